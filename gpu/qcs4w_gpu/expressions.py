"""Whole-number arithmetic as kernels and options write it: grids, workgroup sizes, constants."""

import ast
import math
import re
import warnings
from collections.abc import Mapping
from fractions import Fraction

from .errors import KernelError

_LONGEST_EXPRESSION = 1000
_LARGEST_VALUE = 1 << 128
_NAMES_TOLD = 12


def at_last_comma(text: str) -> tuple[str, str, str]:
    """Part a text at its last comma outside of brackets."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] in ")>") - (text[at] in "(<")
        if text[at] == "," and not depth:
            return text[:at], ",", text[at + 1 :]
    return text, "", ""


def arguments(text: str, names: Mapping[str, int], where: str) -> list[int]:
    """Evaluate a list of expressions; commas inside of calls do not part them."""
    parts = re.findall(r"(?:[^,()]|\([^()]*\))+", text)
    return [evaluate(part, names, where) for part in parts if part.strip()]


def evaluate_positive(expression: str, names: Mapping[str, int], where: str) -> int:
    """Evaluate what has to be at least 1."""
    value = evaluate(expression, names, where)
    if value < 1:
        raise KernelError(f"{where}: '{expression}' is {value}, expected at least 1")
    return value


def evaluate(expression: str, names: Mapping[str, int], where: str) -> int:
    """Evaluate whole-number arithmetic: + - * / %, ceil, min, max, numbers (`32u` too) and names.

    `/` is exact inside `ceil` and rounds down elsewhere, as it does for u32 in WGSL.
    """
    text = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[iu]\b", r"\1", expression).strip()

    def value(node: ast.expr, *, exact: bool = False) -> Fraction:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return Fraction(number)
            case ast.Name(id=name) if name in names:
                return Fraction(names[name])
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Mod() as op, right=right):
                a, b = value(left, exact=exact), value(right, exact=exact)
                if isinstance(op, ast.Add):
                    return a + b
                if isinstance(op, ast.Sub):
                    return a - b
                if isinstance(op, ast.Mult):
                    return a * b
                if b == 0:
                    raise KernelError(f"{where}: division by zero in '{expression}'")
                if isinstance(op, ast.Mod):
                    return a % b
                return a / b if exact else Fraction(a // b)
            case ast.Call(func=ast.Name(id="ceil"), args=[argument], keywords=[]):
                return Fraction(math.ceil(value(argument, exact=True)))
            case ast.Call(func=ast.Name(id="min" | "max" as function), args=[_, *_] as arguments, keywords=[]):
                return (min if function == "min" else max)(value(argument, exact=exact) for argument in arguments)
            case _:
                raise KernelError(
                    f"{where}: cannot evaluate '{ast.unparse(node)}' in '{expression.strip()}'", hint=_grammar(names)
                )

    if len(text) > _LONGEST_EXPRESSION:
        raise KernelError(f"{where}: an expression has {len(text)} characters, expected {_LONGEST_EXPRESSION} at most")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would say more of "1if M" than the error does
            tree = ast.parse(text, mode="eval")
        result = math.floor(value(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise KernelError(f"{where}: cannot evaluate '{expression}': {error}", hint=_grammar(names)) from None
    if abs(result) > _LARGEST_VALUE:
        raise KernelError(f"{where}: '{expression}' is beyond 128 bits")
    return result


def _grammar(names: Mapping[str, int]) -> str:
    known = "".join(f", {name}" for name in list(names)[:_NAMES_TOLD]) + ", …" * (len(names) > _NAMES_TOLD)
    return f"there are + - * % / (rounds down), ceil(a / b), min, max, whole numbers{known}"
