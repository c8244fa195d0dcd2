"""No operation of a chat template takes long or makes much, and the others mean what they mean in Jinja."""

import jinja2
import pytest

from app.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "hello"}]
OPERATIONS = {
    "power": "{{ (messages|length + 8) ** (9 ** 9) }}",
    "power of a constant": "{{ 9 ** (9 ** 9) }}",
    "power of digits": "{{ ('9' * 600)|int ** 3000 }}",
    "squares": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "hexadecimal": "{{ ('f' * 30000000)|int(0, 16) // 3 }}",
    "times": "{{ 'x' * 1000000000 }}",
    "times of a list": "{{ ([1] * 1000000000)|length }}",
    "plus": "{% set ns = namespace(x='xy') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tilde": "{% set ns = namespace(x='xy') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "block": "{% set ns = namespace(x='xy') %}{% for i in range(40) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n - 1) * 2 if n else 'x' }}{% endmacro %}{{ f(40) }}",
    "frames": "{% set b = 'x' * 9000000 %}{% macro f(n) %}{% set y = b[1:] %}{% if n %}{{ f(n - 1) }}{% endif %}"
    "{{ y|length }}{% endmacro %}{{ f(200) }}",
    "tree": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "tree of dicts": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    "{% endfor %}{{ ns.x }}",
    "tree of calls": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}"
    "{% endfor %}{{ ns.x }}",
    "tree of batches": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = ([ns.x] * 2)|batch(2)|first %}{% endfor %}{{ ns.x|tojson }}",
    "sort": "{{ (['a' * 9000000 ~ 'b', 'a' * 9000000 ~ 'a'] * 500000)|sort|length }}",
    "characters": "{{ ('x' * 9000000)|list|length }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "centre": "{{ 'x'|center(1000000000) }}",
    "many centres": "{{ (['x'] * 1000000)|map('center', 9999)|list|length }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(100000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'x' * 1000000}) }}",
    "width": "{{ '%1000000000d' % 5 }}",
    "width by star": "{{ '%*d' % (1000000000, 5) }}",
    "precision by star": "{{ '%-08.*f' % (1000000000, 5.0) }}",
    "width by star with a name": "{{ '%(a)-*d' % {'a': 1000000000} }}",
    "width of the filter": "{{ '%1000000000d'|format(5) }}",
    "width of the method": "{{ '{:>1000000000}'.format(1) }}",
    "width by field": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "repeated field": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "repeated name": "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "replace by filter": "{{ ('x' * 1000000)|replace('', new='y' * 1000000) }}",
    "join": "{{ ('x' * 1000000).join('a' * 99999) }}",
    "join by filter": "{{ (range(99999)|list)|join('x' * 1000000) }}",
    "indent": "{{ ('\n' * 1000000)|indent(9999) }}",
    "indent by text": "{{ ('\n' * 1000000)|indent(width='x' * 9999) }}",
    "indent of JSON": "{{ messages|tojson(indent=1000000000) }}",
    "indent of deep JSON": "{% set ns = namespace(x=[1]) %}{% for i in range(200) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ([ns.x] * 4000)|tojson(indent=9999) }}",
    "separators": "{{ (['x'] * 100000)|tojson(separators=('y' * 1000000, ':')) }}",
    "title": "{{ ('x ' * 10000000)|title }}",
    "sum": "{{ ([[1]] * 900000)|sum(start=[])|length }}",
    "round": "{{ 1.5|round(1000000000) }}",
    "lipsum": "{{ lipsum(n=10000000) }}",
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_of_a_template_takes_long_or_makes_much(operation):
    with pytest.raises(ChatTemplateError, match="refuses these messages") as refused:
        ChatTemplate(OPERATIONS[operation], {}).render(MESSAGES)
    assert "takes longer" not in str(refused.value), "the time is looked at between operations only"


def test_a_value_that_is_not_shown_costs_nothing():
    tree = "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(l=[ns.x, ns.x]) %}{% endfor %}"
    assert ChatTemplate(f"{tree}{{{{ ns.x }}}}", {}).render(MESSAGES) == "<Namespace>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ ['%s-%02d' % ('a', 7), '{:>4}|{}'.format('b', 1.5), 'c'.center(3), '%.2f'|format(1)] }}", None),
        ("{{ '**%s**, * %d' % ('a', 7) }}{{ '* **{}**: {:*^9}'.format('b', 1) }}", None),
        ("{{ [1, 2, 3] + [4] * 2 }}{{ (1, 2) + (3,) }}{{ {'a': [1]}['a'][0] }}{{ 'abc'[1:] ~ 1 ~ none }}", None),
        ("{{ 2 ** 10 + 7 // 2 - 7 % 4 * 3 }}{{ 7 / 2 }}{{ -1 }}{{ 2 ** -1 }}{{ 'ab' * 2 }}", None),
        ("{{ [3, 1, 2]|sort|join(', ') }}{{ 'a'.join(['x', 'y']) }}{{ [1, 2, 3]|batch(2)|list }}", None),
        ("{{ [1, 2]|sum }}{{ [{'a': 1}]|map(attribute='a')|list }}{{ 'a b'|title }}{{ [1, 1]|unique|list }}", None),
        ("{{ 'a\nb'|indent(2) }}{{ 'aa'|replace('a', 'b', 1) }}{{ 'aa'.replace('a', 'b') }}{{ 1.25|round(1) }}", None),
        ("{% set a, b = 1, [2] %}{{ a }}{{ b }}{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}", None),
        ("{% macro f(a, b=1) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1, b=2) }}", None),
        ("{% macro f(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call f(3) %}{{ 'c' }}{% endcall %}", None),
        (
            "{% filter upper %}a{% endfilter %}{% set x %}q{{ 1 }}{% endset %}{{ x }}{{ x|length }}{{ x is string }}",
            None,
        ),
        ("{% for m in [[1], 2] recursive %}{{ m if m is number else loop(m) }}{{ loop.index }}{% endfor %}", None),
        ("{{ {'b': 1, 'a': 2}|dictsort }}{{ {'b': 1}|items|list }}{{ 'a,b'.split(',')|last }}{{ [1]|first }}", None),
        ("{{ [{'a': 1}, {'a': 0}]|selectattr('a')|list }}{{ ['a', '']|select|list }}", None),
        ("{{ range(3)|reject('odd')|sum }}", None),
        ("{{ none|map('upper')|list }}{{ none|selectattr('a')|list }}{{ none|rejectattr('a')|list }}", None),
        (
            "{{ 5|default(2000000) }}{{ 'x'|default('y', true) }}{{ dict(a=1).get('b', 3000000) }}{{ '12'|int + 1 }}",
            None,
        ),
        ("{{ missing ~ 'a' }}{{ missing|join('x') }}{{ missing|list }}{{ missing|map('upper')|list }}", None),
        ("{{ {'b': 1, 'a': 'é<'}|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":"é<","b":1}'),
        ("{{ [{'a': 1}]|tojson(indent=2) }}", '[\n  {\n    "a": 1\n  }\n]'),
        ("{% set ns = namespace(n=0) %}{% for m in range(9) %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "36"),
    ],
)
def test_what_is_bounded_means_what_it_means_in_jinja(template, text):
    expected = jinja2.Environment(autoescape=False).from_string(template).render() if text is None else text
    assert ChatTemplate(template, {}).render(MESSAGES) == expected


def test_a_template_may_collect_thousands_of_messages():
    collect = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}"
    template = ChatTemplate(f"{collect}{{% for m in ns.l %}}{{{{ m.content }}}}{{% endfor %}}", {})
    assert template.render([{"role": "user", "content": "x"}] * 4096) == "x" * 4096
