"""Text to tokens and back: tokenizer, chat template, detokenizer with stop strings, and parsers of output.

Nothing here knows HTTP or the engine. app/api has the fields of requests, and makes prompts and answers of these parts.
"""
