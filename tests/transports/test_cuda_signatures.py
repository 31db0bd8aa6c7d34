"""Calls of the driver have the signatures of NVIDIA's binding: those in Python, those of native code, and the double's.

Tests on the double of the driver do not show that, because a double may share a mistake with its callers. NVIDIA
generates the declarations of the binding from cuda.h. They need neither a driver nor a GPU.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.cuda_on_host import ROOT

binding = pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")

DECLARATIONS = Path(binding.__file__).with_name("cydriver.pxd")
DOUBLE = ROOT / "tests" / "native" / "fake_libcuda.cpp"
NATIVE = ROOT / "transports" / "native" / "core" / "cuda"
CALLERS = ("transports/cuda", "bench", "collectives/device", "unisono/cli/machine", "tests/support", "tests/transports")

# How C passes an argument: as a pointer or a number of 64 bits, as a number of 32 bits, or as a structure.
WORD, HALF, STRUCTURE, OPAQUE = "64 bits", "32 bits", "structure", ""
WORDS = {"size_t", "uintptr_t", "uint64_t", "cuuint64_t", "CUdeviceptr", "unsigned long long"}
STRUCTURES = {"CUipcMemHandle", "CUipcEventHandle", "Handle"}
HANDLES = {"Context", "Stream", "Event", "Module", "Function", "Graph", "GraphExec", "MemoryPool"}
WORDS |= {f"CU{handle[0].lower()}{handle[1:]}" for handle in HANDLES}
BYTES = {"void", "char", "unsigned char", "CUuuid", "CUmemPoolProps", "PoolProperties"}
NUMBERS = {"int", "unsigned", "unsigned int", "unsigned long long", "unsigned char"}

# Calls by one of these names take the name of a function of the driver, and then its arguments.
MAKES_CALL = {"driver", "_driver", "relaxed", "attempt", "_issue", "_call", "_give_back", "_destroy"}


class Passed(NamedTuple):
    """How an argument is passed, and the values to which it points: `OPAQUE` for bytes, and if it is no pointer."""

    as_: str
    to: str = OPAQUE


def passed(declared: str) -> Passed:
    """Return how the argument with a declaration of C, such as ``unsigned int flags``, is passed."""
    words = re.sub(r"\bconst\b|\bstd::", " ", declared).replace("*", " ").split()
    kind = " ".join(words) if " ".join(words) in NUMBERS else " ".join(words[:-1]) or words[0]
    width = WORD if kind in WORDS else STRUCTURE if kind in STRUCTURES else HALF
    pointers = declared.count("*")
    if not pointers:
        return Passed(width)
    return Passed(WORD, WORD if pointers > 1 else OPAQUE if kind in BYTES | STRUCTURES else width)


def arguments_of(declared: str) -> list[Passed]:
    return [passed(each) for each in declared.split(",") if each.strip()]


def differences(declared: dict[str, str]) -> list[str]:
    """Return the functions whose arguments are not those of the binding, with both declarations."""
    nvidias = dict(re.findall(r"^cdef CUresult (cu\w+)\((.*)\) except", DECLARATIONS.read_text(), re.MULTILINE))

    # A pointer to bytes in one of them may be any pointer in the other one.
    def agree(mine: Passed, nvidia: Passed) -> bool:
        return mine.as_ == nvidia.as_ and (OPAQUE in (mine.to, nvidia.to) or mine.to == nvidia.to)

    return [
        f"{name}({mine}), and in the binding ({nvidias.get(name)})"
        for name, mine in declared.items()
        if name not in nvidias
        or len(arguments_of(mine)) != len(arguments_of(nvidias[name]))
        or not all(map(agree, arguments_of(mine), arguments_of(nvidias[name])))
    ]


def test_double_of_the_driver_declares_the_functions_of_the_binding() -> None:
    text = DOUBLE.read_text()
    functions = dict(re.findall(r"^(?:static )?int (cu\w+)\(([^)]*)\)[ ;]", text, re.MULTILINE))
    table = dict(re.findall(r'\{"(cu\w+)", untyped\((\w+)\)\}', text))
    # An old name that the binding uses for cuGraphInstantiate.
    del table["cuGraphInstantiateWithFlags"]
    assert len(table) > 50
    assert not differences({name: functions[function] for name, function in table.items()})


def test_native_code_declares_the_functions_of_the_binding() -> None:
    sources = sorted(NATIVE.iterdir())
    types, names = dict[str, str](), dict[str, str]()
    for text in map(Path.read_text, sources):
        types |= dict(re.findall(r"int \(\*(\w+)\)\(([^)]*)\)", text))
        names |= {name: function for function, name in re.findall(r'(\w+), "(cu[A-Z][A-Za-z0-9]*)"\)', text)}
    assert len(names) == 10
    names["cuGetProcAddress"] = "get_address_"  # found by its symbol
    assert not differences({name: types[function] for name, function in names.items()})


def test_differences_of_signatures_are_found() -> None:
    assert not differences({"cuMemAlloc": "void** made, size_t nbytes", "cuInit": "unsigned"})
    (found,) = differences({"cuMemAlloc": "void** made, int nbytes"})
    assert found == "cuMemAlloc(void** made, int nbytes), and in the binding (CUdeviceptr* dptr, size_t bytesize)"
    assert len(differences({"cuMemAlloc": "int* made, size_t nbytes", "cuNone": "", "cuInit": "unsigned, int"})) == 3


def calls_in(path: Path) -> Iterator[tuple[int, str, list[ast.expr]]]:
    """Yield the line, the name and the arguments of each call of the driver in a file of Python."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        by = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        match node.args:
            case [ast.Constant(value=str(name)), *arguments] if by in MAKES_CALL and re.match("cu[A-Z]", name):
                yield node.lineno, name, arguments


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each name of the binding in a file of Python, with dots before its constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match("CU[a-z_]|cu[A-Z]", node.attr):
            of_enumeration = isinstance(node.value, ast.Attribute) and node.value.attr.startswith("CU")
            yield node.lineno, f"{node.value.attr}.{node.attr}" if of_enumeration else node.attr  # type: ignore[attr-defined]


def exists(name: str) -> bool:
    """Return whether the binding has a name, or, without a dot, an enumeration with such a constant."""
    first, _, constant = name.partition(".")
    of_module = getattr(binding, first, None)
    if constant:
        return hasattr(of_module, constant)
    return of_module is not None or any(
        hasattr(each, first) for each in vars(binding).values() if _is_enumeration(each)
    )


def _is_enumeration(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "__members__")


def test_python_calls_the_functions_of_the_binding_with_their_arguments() -> None:
    wrong, called = [], set()
    for path in (path for folder in CALLERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for line, name, arguments in calls_in(path):
            called.add(name)
            function = getattr(binding, name, None)
            count = -1 if function is None else len(inspect.signature(function).parameters)
            if count < len(arguments) or (len(arguments) < count and not any(map(_is_star, arguments))):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} of {len(arguments)} arguments, not {count}")
    assert not wrong
    assert len(called) > 40


def _is_star(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred)


def test_names_of_the_binding_in_python_exist() -> None:
    paths = [path for folder in CALLERS for path in sorted((ROOT / folder).rglob("*.py"))]
    names = {name: f"{path.relative_to(ROOT)}:{line}" for path in paths for line, name in names_in(path)}
    assert len(names) > 20
    assert not {name: where for name, where in names.items() if not exists(name)}
