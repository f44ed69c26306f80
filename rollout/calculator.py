"""Owns arithmetic on untrusted text: numbers and operators only, within bounds of size and depth."""

import ast
import math
import operator
from collections.abc import Callable

MAX_CHARS = 200
MAX_DEPTH = 32
MAX_MAGNITUDE = 1e30
MAX_EXPONENT = 100

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculate(expression: str) -> tuple[str, str]:
    """Return the value as text and "", or "" and what is wrong with the expression; never raises."""
    if len(expression) > MAX_CHARS:
        return "", f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _evaluate(tree.body, MAX_DEPTH)
    except ZeroDivisionError:
        return "", "division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        told = str(error) if isinstance(error, _RefusedError) else "not an arithmetic expression"
        return "", told
    return (str(int(value)) if float(value).is_integer() else repr(value)), ""


class _RefusedError(ValueError):
    """Raised when an expression holds something that is not computed here."""


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise _RefusedError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            value = _UNARY[type(op)](_evaluate(operand, depth - 1))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_evaluate(left, depth - 1), _evaluate(right, depth - 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            value = _BINARY[type(op)](_evaluate(left, depth - 1), _evaluate(right, depth - 1))
        case _:
            raise _RefusedError("only numbers, + - * / // % ** and parentheses can be computed")
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        raise _RefusedError("the result is not a number below 1e30")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_EXPONENT:
        raise _RefusedError(f"the exponent {exponent} is beyond {MAX_EXPONENT}")
    value: Number = base**exponent
    return value
