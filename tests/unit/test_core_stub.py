"""`_C.pyi` and `_grammar.pyi` say what the extensions have: names, parameters, defaults, and types.

Types as far as both say them. pybind11 writes each signature into the docstring; both sides become
text of one form.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import openspec
from openspec import _C, _grammar


def stub_of(module: ModuleType) -> ast.Module:
    name = module.__name__.rpartition(".")[2]
    return ast.parse(Path(openspec.__file__).with_name(f"{name}.pyi").read_text())


MODULES = pytest.mark.parametrize("module", [_C, _grammar])
ALIASES = {
    target.id: ast.unparse(node.value)
    for node in stub_of(_C).body
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name)
}
NOT_TYPED = {"object", "list"}
"""What pybind11 says of a Python object of any type and of a list that is filled by hand."""
SPELLINGS = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"\b(numpy\.typing|npt)\.", ""),
    (r"(openspec\._C|openspec\._grammar|collections\.abc|typing|typing_extensions)\.", ""),
    (r"\bnp\.", "numpy."),
    (r"\bMapping\b", "dict"),
    (r"\bbytes\b", "str"),  # std::string takes both
    (r"\bb''", "''"),
)


def one_form(text: str) -> str:
    for spelling, name in SPELLINGS:
        text = re.sub(spelling, name, text)
    for name, meaning in ALIASES.items():
        text = re.sub(rf"\b{name}\b", meaning, text)
    return text


def signature(node: ast.FunctionDef, other: ast.FunctionDef | None) -> str:
    """`other` says of which parameters, by place, the types are left out."""
    kinds = [("", node.args.posonlyargs + node.args.args), ("*, ", node.args.kwonlyargs)]
    defaults: list[ast.expr | None] = [*node.args.defaults]
    names: list[str] = []
    untyped = {argument.arg for argument in untyped_of(other)} if other else set()
    for prefix, arguments in kinds:
        if prefix:
            defaults = [*node.args.kw_defaults]
        missing: list[ast.expr | None] = [None] * (len(arguments) - len(defaults))
        for argument, default in zip(arguments, missing + defaults, strict=True):
            if argument.arg == "self":
                continue
            kind = argument.annotation
            said = one_form(ast.unparse(kind)) if kind and argument.arg not in untyped else "?"
            value = "" if default is None else f" = {one_form(ast.unparse(default))}"
            names.append(f"{prefix}{argument.arg}: {said}{value}")
    returned = one_form(ast.unparse(node.returns)) if node.returns else "?"
    if other and other.returns and ast.unparse(other.returns) in NOT_TYPED:
        returned = "?"
    return f"({', '.join(names)}) -> {returned}"


def untyped_of(node: ast.FunctionDef) -> list[ast.arg]:
    arguments = node.args.args + node.args.kwonlyargs
    return [one for one in arguments if one.annotation and ast.unparse(one.annotation) in NOT_TYPED]


def bound_signature(doc: str) -> ast.FunctionDef:
    head = doc.strip().splitlines()[0]
    text = head if head[0] != "(" else f"get{head}"
    [node] = ast.parse(f"def {text}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return node


def compare(name: str, doc: str | None, stub: ast.FunctionDef) -> None:
    assert doc, name
    bound = bound_signature(doc)
    if bound.args.args and bound.args.args[0].arg == "arg0":
        bound.args.args[0].arg = "self"
    assert signature(bound, bound) == signature(stub, bound), name


def members_of(owner: type) -> set[str]:
    hidden = {"__init__"} if vars(owner)["__init__"].__doc__.startswith("__init__(") else set()
    return hidden | {name for name in vars(owner) if not name.startswith("_")}


@MODULES
def test_every_name_is_bound_and_documented(module: ModuleType) -> None:
    stub_body = stub_of(module).body
    functions = {node.name: node for node in stub_body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in stub_body if isinstance(node, ast.ClassDef)}
    names = {name for name in dir(module) if not name.startswith("_")}
    assert {*functions, *classes} == names
    for name, stub in functions.items():
        compare(name, getattr(module, name).__doc__, stub)


@MODULES
def test_every_member_is_as_the_stub_says(module: ModuleType) -> None:
    for stub in stub_of(module).body:
        if not isinstance(stub, ast.ClassDef):
            continue
        owner: type = getattr(module, stub.name)
        if issubclass(owner, Exception):
            continue
        methods = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
        fields = {
            node.target.id: one_form(ast.unparse(node.annotation))
            for node in stub.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert {*methods, *fields} == members_of(owner), stub.name
        for name, field in fields.items():
            returned = bound_signature(vars(owner)[name].fget.__doc__).returns
            assert returned and one_form(ast.unparse(returned)) == field, f"{stub.name}.{name}"
        for name, method in methods.items():
            member = vars(owner)[name]
            doc = member.fget.__doc__ if isinstance(member, property) else member.__doc__
            assert isinstance(member, property) == bool(method.decorator_list), name
            compare(f"{stub.name}.{name}", doc, method)
