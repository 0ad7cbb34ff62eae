"""Messages for wrong descriptors and epilogues. Loaded when one is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernlib.hints import spelling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

    from kernlib.descriptors.base import Descriptor

# Arguments of some call, whichever family's and epilogue's, and how an example writes them.
_OF_CALLS = {
    "bandwidth": "1.0",
    "alpha": "1.0",
    "beta": "1.0",
    "bias": "bias",
    "epsilon": "1e-6",
    "feature_map": "weights",
    "gamma": "1.0",
    "inner_scale": "-1.0",
    "lengthscale": "lengthscale",
    "offset": "1.0",
    "out": "out",
    "p": "1.5",
    "q": "1.0",
    "regularization": "1e-3",
    "scale": "1.0",
    "y": "y",
}


TRACED = (  # what to do with a Proxy
    "torch.fx.symbolic_trace takes layers of kernlib.nn, and of other calls those in a function "
    "whose name torch.fx.wrap was given"
)


def refuse_fields(what: str, named: dict, fields: Iterable[str], make: Callable) -> None:
    """Raises TypeError for the first of the keywords that is none of the ``fields`` of ``what``,
    and says where an argument of a call goes. ``make`` makes a descriptor of the other keywords."""
    fields = list(fields)
    name = next(name for name in named if name not in fields)
    text = f"{what}() got an unexpected keyword argument {name!r}"
    try:
        descriptor = make(**{key: value for key, value in named.items() if key in fields})
    except (TypeError, ValueError):  # which the caller hears of when this is mended
        descriptor = None
    if descriptor is not None and name in (*descriptor.required, *descriptor.options):
        raise TypeError(f"{text}: it is an argument of the call, {call_of(what, descriptor, name)}")
    if descriptor is not None and name in _OF_CALLS:
        raise TypeError(
            f"{text}: it is an argument of a call, as in {call_of('', descriptor, name)}, of "
            "descriptors whose stages or epilogue take it"
        )
    if descriptor is not None and name == "epilogue" and descriptor.epilogue:
        raise TypeError(text + _own_epilogue(what, descriptor))
    hint = spelling.argument(name, fields)
    raise TypeError(text + (hint or f"; it takes {', '.join(fields)}"))


def _own_epilogue(what: str, descriptor: Descriptor) -> str:
    """Why ``what`` takes no epilogue, and what does."""
    epilogue, bare = f"kernlib.{descriptor.epilogue[0]!r}", descriptor.replace(epilogue=())
    takes = f"kernlib.{bare.describe()}(epilogue="
    return (
        f": {what} has an epilogue of its own, {epilogue}. {takes}...) takes another in its place, "
        f"and {takes}({epilogue}, ...)) more behind it"
    )


def refuse_call(descriptor: Descriptor) -> NoReturn:
    """Raises TypeError for a descriptor that is called like a function."""
    raise TypeError(
        f"{descriptor.describe()} is a descriptor and no function: write kernlib.{descriptor.call}"
    )


def refuse_positional(what: str, value: str, make: Callable) -> None:
    """Raises TypeError for a value that ``what`` has no place for."""
    descriptor = make()
    text = f": numbers are arguments of the call, {call_of(what, descriptor)}"
    goes = text if descriptor.required else ""
    raise TypeError(f"{what}() got an unexpected positional argument, {value}{goes}")


def call_of(what: str, described: Descriptor, *names: str) -> str:
    """A call of a descriptor that ``what`` makes, with arguments of these names."""
    named = dict.fromkeys((*described.required, *names))
    values = [f"{name}={_OF_CALLS.get(name, '...')}" for name in named]
    descriptor = f"{what}()" if what and what[0].islower() else "descriptor"
    return f"run_kernel({', '.join([descriptor, *described.operands, *values])})"


def instead_of_descriptor(value: object) -> str:
    """What to write in place of something that is no descriptor, or ""."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return ": the descriptor comes first, before the tensors"
    if isinstance(value, str):
        names = [name for name in spelling.meant("kernlib", value) if _makes_descriptor(name)]
        return f": write {' or '.join(f'{name}()' for name in names)}" if names else ""
    if hasattr(value, "expression") and not isinstance(value, type):
        return f": an epilogue is part of a descriptor, as in kernlib.Pairwise(epilogue={value!r})"
    if _makes_descriptor(f"kernlib.{getattr(value, '__name__', '')}"):
        return f": call it, kernlib.{value.__name__}({'...' if _needs_arguments(value) else ''})"
    return ""


def instead_of_part(value: object, kinds: Iterable[type]) -> str:
    """What to write in place of something that is no part of a descriptor, of these ``kinds``, or
    ""."""
    by_word = {kind.__name__.lower(): kind for kind in kinds}
    if isinstance(value, type) and value in by_word.values():
        return f": call it, kernlib.{value.__name__}({'...' if _needs_arguments(value) else ''})"
    if isinstance(value, str) and not value.isidentifier() and "custom" in by_word:
        return f": an expression of v is kernlib.Custom({value!r})"
    if epilogues := getattr(value, "epilogue", None):
        return f": that is a whole descriptor, whose epilogue is {epilogues[0]!r}"
    name = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
    word = name.replace("_", "").lower()
    kind = by_word.get("silu" if word == "swish" else word)
    if kind is None or kind.__name__ == "Custom":
        return ""
    settings = [f"{x}={getattr(value, x)!r}" for x in _SETTINGS if hasattr(value, x)]
    return f": write kernlib.{kind.__name__}({', '.join(settings)})"


_SETTINGS = ("negative_slope", "approximate")  # of torch's modules, which epilogues call the same


def instead_of_tensor(name: str, value: object) -> str:
    """What was passed for the tensor ``name``, such as "ndarray", and the line that makes a tensor
    of it, if there is one."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if type(value).__name__ == "Proxy":  # a Proxy has every attribute
        return f"Proxy; {TRACED}"
    place = name if name.replace("[", "").replace("]", "").isidentifier() else "value"
    line = _line_of_tensor(value, place)
    return type(value).__name__ + (f": pass {line}" if line else "")


def _line_of_tensor(value: object, name: str) -> str:
    # Only with strides: Dynamo cannot split the module's text otherwise.
    if hasattr(value, "strides") and str(type(value).__module__).split(".")[0] == "numpy":
        if getattr(value, "ndim", 0) == 0:
            return f"torch.tensor({name})"
        turned = any(step < 0 for step in value.strides)  # torch.from_numpy refuses these
        return f"torch.from_numpy({name}{'.copy()' if turned else ''})"
    if hasattr(value, "to_numpy"):  # of pandas and polars
        return f"torch.from_numpy({name}.to_numpy())"
    if hasattr(value, "toarray"):  # a sparse matrix of scipy
        return f"torch.from_numpy({name}.toarray())"
    if hasattr(value, "__dlpack__"):
        return f"torch.from_dlpack({name})"
    if hasattr(value, "__array__"):
        return f"torch.from_numpy(numpy.asarray({name}))"
    numbers = isinstance(value, (list, tuple, int, float)) and not isinstance(value, bool)
    return f"torch.tensor({name})" if numbers and name != "out" else ""


def _makes_descriptor(path: str) -> bool:
    """Whether a name of kernlib is that of a class of descriptors, or of a function that makes
    one."""
    import kernlib

    value = getattr(kernlib, path.removeprefix("kernlib."), None) if path[8:] else None
    return callable(value) and getattr(value, "__module__", "").endswith(".descriptor")


def _needs_arguments(make: Callable) -> bool:
    import inspect

    parameters = inspect.signature(make).parameters.values()
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters)
