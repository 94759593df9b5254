"""The measures of the house, as far as a program can see them."""

from __future__ import annotations

import ast

import pytest

from tests.contract.source_tree import SourceFile, calls, functions, sources

MAY_READ_ENVIRONMENT = (
    *("dglkge.distributed.world", "dglkge.distributed.runtime", "dglkge.distributed.dgl_import"),
    *("dglkge.launch", "dglkge.data.public_data"),
)


def library() -> tuple[SourceFile, ...]:
    """The files of the package."""
    return sources("dglkge")


def code() -> tuple[SourceFile, ...]:
    """All files except the tests."""
    return sources("dglkge", "partition_tools", "examples", "benchmarks")


def documented(tree: ast.AST) -> list[ast.AST]:
    """The module, and every public class and function that a reader can reach: none inside a function."""
    found = [tree]
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (is_function or isinstance(node, ast.ClassDef)) and not node.name.startswith("_"):
            found.append(node)
        if not is_function and not (isinstance(node, ast.ClassDef) and node.name.startswith("_")):
            pending.extend(ast.iter_child_nodes(node))
    return found


def environment_reads(source: SourceFile) -> list[str]:
    """Places where a file touches the process's environment."""
    found = []
    for node in ast.walk(source.tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            name = " ".join(f"os.{alias.name}" for alias in node.names)
        if any(word in name.split() for word in ("os.environ", "os.environb", "os.getenv", "os.putenv")):
            found.append(f"{source.name}:{node.lineno}")
    return found


def pickle_reads(source: SourceFile) -> list[str]:
    """Places where a file may run a pickle that somebody else wrote."""
    found = []
    for name, call in calls(source.tree):
        constants = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
        safe = {
            # Of readers/ogb.py: it calls nothing but what makes arrays.
            "torch.load": constants.get("weights_only") is True
            or "pickle_module=ARRAYS_ONLY" in ast.unparse(call),
            "np.load": constants.get("allow_pickle", False) is False,
            "pickle.load": False,
            "pickle.loads": False,
            "pickle.Unpickler": False,
            "pd.read_pickle": False,
        }
        if not safe.get(name, True):
            found.append(f"{source.name}:{call.lineno} {name}")
    return found


def overrides(trees: list[ast.AST]) -> set[ast.AST]:
    """Methods that a base class has too, found by the names of classes: the base class documents them."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    named = {each.name: each for each in classes}
    methods = {each: {item.name: item for item in each.body if hasattr(item, "args")} for each in classes}

    def bases(each: ast.ClassDef) -> list[ast.ClassDef]:
        words = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in each.bases]
        direct = [named[word] for word in words if word in named and named[word] is not each]
        return direct + [base for one in direct for base in bases(one)]

    return {
        method
        for each in classes
        for name, method in methods[each].items()
        if any(name in methods[base] for base in bases(each))
    }


def test_everything_public_has_a_docstring():
    exempt = overrides([source.tree for source in code()])
    assert not [
        f"{source.name}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'the module')}"
        for source in code()
        for node in documented(source.tree)
        if not ast.get_docstring(node) and node not in exempt
    ]


def test_an_override_is_told_from_a_new_method():
    tree = ast.parse(
        "class A:\n def f(self): ...\nclass B(A): ...\nclass C(B):\n def f(self): ...\n def g(self): ..."
    )
    assert {node.name for node in overrides([tree])} == {"f"}


def test_every_function_has_types():
    """Of what comes in as well as of what goes out; mypy holds them to be right."""
    untyped = []
    everywhere = [(source, function) for source in code() for function in functions(source.tree)]
    for source, function in everywhere:
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        missing = [item.arg for item in named if item.annotation is None and item.arg not in ("self", "cls")]
        if function.returns is None and function.name != "__init__":
            missing.append("return")
        if missing:
            untyped.append(f"{source.name}:{function.lineno} {function.name}: {', '.join(missing)}")
    assert not untyped


def test_annotations_are_not_evaluated():
    """Newer annotations then run on Python 3.9 too."""
    evaluated = []
    for source in code():
        from_future = [node for node in source.tree.body if getattr(node, "module", "") == "__future__"]
        if len(source.tree.body) > 1 and not from_future:
            evaluated.append(source.name)
    assert not evaluated


def test_library_does_not_print():
    assert not [
        f"{source.name}:{node.lineno}"
        for source in library()
        for name, node in calls(source.tree)
        if name == "print" and not source.module.startswith("dglkge.cli")
    ]


def test_no_assert():
    """``python -O`` drops them: a check of input is an InputError."""
    assert not [
        f"{source.name}:{node.lineno}"
        for source in code()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert)
    ]


def test_environment_is_read_in_few_places():
    elsewhere = [source for source in library() if not source.module.startswith(MAY_READ_ENVIRONMENT)]
    assert not [place for source in elsewhere for place in environment_reads(source)]


def test_no_pickle_is_trusted():
    assert not [place for source in code() for place in pickle_reads(source)]


@pytest.mark.parametrize(
    "text",
    ["os.environ['A']", "os.getenv('A')", "from os import environ", "f(os.environ)", "os.environ.get('A')"],
)
def test_checker_finds_reads_of_the_environment(text):
    some = library()[0]
    assert environment_reads(SourceFile(some.path, text, ast.parse(text)))
    innocent = "os.getpid(); os.path.join('environ')"
    assert not environment_reads(SourceFile(some.path, innocent, ast.parse(innocent)))


def test_checker_knows_what_is_public():
    text = "class A:\n  def b(): ...\n  def _c(): ...\ndef d():\n  def e(): ...\nclass _F:\n  def g(): ..."
    names = {getattr(node, "name", "module") for node in documented(ast.parse(text))}
    assert names == {"module", "A", "b", "d"}


@pytest.mark.parametrize(
    "text, is_safe",
    [
        ("torch.load(f)", False),
        ("torch.load(f, weights_only=False)", False),
        ("torch.load(f, weights_only=True)", True),
        ("torch.load(f, weights_only=False, pickle_module=pickle)", False),
        ("torch.load(f, weights_only=False, pickle_module=ARRAYS_ONLY)", True),
        ("np.load(f, allow_pickle=True)", False),
        ("np.load(f, allow_pickle=False)", True),
        ("np.load(f)", True),
        ("pickle.loads(b)", False),
    ],
)
def test_checker_finds_pickles(text, is_safe):
    found = pickle_reads(SourceFile(library()[0].path, text, ast.parse(text)))
    assert len(found) == (0 if is_safe else 1)
