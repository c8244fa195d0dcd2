"""The server knows no instrument: neither by import, which a contract holds, nor as a program that it starts."""

import ast
import re

from tests import ROOT


def test_no_module_of_the_tools_is_named_in_app():
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"tools(\.\w+)+", node.value), path
