"""Models of transformers whose layers are :class:`kernlib.nn.SparseLinear`, by
``from_pretrained`` and ``save_pretrained`` alone.

``config.json`` of such a folder says which layers are compressed::

    "quantization_config": {"quant_method": "kernlib", "version": 1, "fuse": true,
                            "modules": ["model.layers.0.mlp.up_proj", ...]}

``modules`` are whole names of layers whose weight the files hold as ``NAME.weight_packed``, a
vector of uint8, and whose bias, if any, is ``NAME.bias``; ``fuse`` says whether layers that read
one x become one product, as those of ``kernlib.nn.sparsify``. Before weights are read, these layers
are swapped for empty ones on meta, so that neither the host nor a GPU ever holds a dense weight.

``kernlib.nn.sparsify(model)`` writes this configuration into a model of transformers, and
``save_pretrained`` brings it up to date with the layers that the model has then. ``import kernlib``
registers the two classes, before or after ``import transformers``; a program without kernlib, which
transformers warns of, draws such layers anew.

Needs transformers of version 5.17 or newer, whose names for quantized models (Hugging Face's
``HfQuantizer``) this module uses; it imports without them, so that its names can be listed.

Example:
    >>> import kernlib, transformers  # doctest: +SKIP
    >>> kernlib.nn.sparsify(model, match="proj", density=0.4)  # doctest: +SKIP
    >>> model.save_pretrained("folder")  # doctest: +SKIP
    >>> transformers.AutoModelForCausalLM.from_pretrained("folder")  # doctest: +SKIP
    LlamaForCausalLM(...
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from kernlib.descriptors.base import shown
from kernlib.errors import warn
from kernlib.hints.calls import hinted
from kernlib.hooks import AFTER_SWAPS, AWAITED

__all__ = ["KernlibConfig", "KernlibQuantizer", "attach", "register"]

NAME = "kernlib"  # the quant_method
VERSION = 1
NEEDED = (
    "kernlib.compat.transformers needs transformers of version 5.17 or newer: pip install "
    "'transformers>=5.17' accelerate safetensors"
)

_Config: Any
_Quantizer: Any
try:
    _Config = import_module("transformers.utils.quantization_config").QuantizationConfigMixin
    _Quantizer = import_module("transformers.quantizers.base").HfQuantizer
except (AttributeError, ImportError) as _error:
    MISSING: Exception | None = _error
    _Config = _Quantizer = object
else:
    MISSING = None


def _check_installed() -> None:
    if MISSING is not None:
        raise ImportError(f"{NEEDED} ({MISSING})") from MISSING


@hinted
class KernlibConfig(_Config):
    """What ``config.json`` says of compressed layers.

    - ``modules``: whole names of the layers whose weight is stored as ``NAME.weight_packed``.
    - ``fuse``: whether layers that read one x become one product after loading, as with
      ``fuse=None`` of :func:`kernlib.nn.sparsify`.
    - ``version``: of this format, 1. ``quant_method``: ``"kernlib"``.

    Raises ValueError for ``modules`` that are no list of different names, for another ``version``
    or ``quant_method``, for a ``fuse`` that is no bool and for ``others``, each with what would do;
    ImportError without transformers.
    """

    def __init__(
        self,
        modules: Any,
        fuse: bool = True,
        version: int = VERSION,
        quant_method: str = NAME,
        **others: Any,
    ):
        _check_installed()
        if type(version) is not int or version != VERSION:
            raise _wrong(
                f"has version {shown(version)}, and this kernlib reads version {VERSION}: "
                "install a newer kernlib, or save the model by this one"
            )
        if quant_method != NAME:
            raise _wrong(f"has quant_method {shown(quant_method)}, which must be {NAME!r}")
        if others:
            names = ", ".join(map(repr, others))
            raise _wrong(f"has {names}, which version {VERSION} does not: leave it out")
        is_list = isinstance(modules, (list, tuple))
        if not is_list or not all(isinstance(name, str) and name for name in modules):
            raise _wrong(
                "must have modules, a list of whole names of layers such as "
                f"'model.layers.0.mlp.up_proj', got {shown(modules)}"
            )
        if len(set(modules)) < len(modules):
            twice = next(name for name in modules if modules.count(name) > 1)
            raise _wrong(f"names {twice!r} twice in modules: leave one out")
        if not isinstance(fuse, bool):
            raise _wrong(f"must have a bool for fuse, got {shown(fuse)}")
        self.quant_method = quant_method
        self.version = version
        self.modules = list(modules)
        self.fuse = fuse

    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The configuration in ``config_dict``, as ``config.json`` has it, and with
        ``return_unused_kwargs`` those of ``kwargs`` beside it. Raises ValueError for one that is
        damaged, naming what is wrong."""
        for key in ("version", "modules"):
            if key not in config_dict:
                raise _wrong(
                    f"has no {key!r}: it must be {{'quant_method': 'kernlib', 'version': "
                    f"{VERSION}, 'modules': [...], 'fuse': true}}"
                )
        config = cls(**config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """A new dictionary of plain values, as it stands in ``config.json``. Raises nothing."""
        return {
            "quant_method": self.quant_method, "version": self.version,
            "modules": list(self.modules), "fuse": self.fuse,
        }  # fmt: skip

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, as of the dictionary that transformers also takes it for, or
        ``default``. Raises nothing."""
        return self.to_dict().get(key, default)

    def __iter__(self):
        return iter(self.to_dict().items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernlibConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _wrong(what: str) -> ValueError:
    return ValueError(f"the quantization_config of kernlib {what}")


class KernlibQuantizer(_Quantizer):
    """Loads and saves models of a :class:`KernlibConfig` for transformers, which makes it.

    - ``quantization_config``: the :class:`KernlibConfig`.
    - ``kwargs``: ``pre_quantized``, which transformers says.

    ``from_pretrained`` raises ValueError that names the layer for a name of no ``nn.Linear`` or
    ``Conv1D`` of the model, for one whose weight is tied to another's, for weights that the files
    lack, and for those of another shape; and for tensor parallelism, which these layers do not
    take. A ``dtype`` other than the stored one rounds the values. Warns with a
    :class:`kernlib.KernlibWarning` of files that hold all these weights dense, and loads them so.
    """

    requires_calibration = True
    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: KernlibConfig, **kwargs: Any):
        _check_installed()
        if not kwargs.get("pre_quantized", True):
            raise ValueError(
                "quantization_config of kernlib is that of a folder with compressed weights, and "
                "this one has none: load it without a quantization_config, compress the model by "
                "kernlib.nn.sparsify, and save_pretrained writes both"
            )
        super().__init__(quantization_config, **kwargs)
        self._places: dict[str, int] = {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """True: ``save_pretrained`` writes the compressed weights. Raises nothing."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> Any:
        from kernlib.compat.loading import emptied

        self._places = emptied(model, self.quantization_config.modules, checkpoint_files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from kernlib.compat.loading import finished

        if not self._places:  # the files are those of a dense model
            for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
                holder.__dict__.pop(name, None)
        finished(model, self._places, self.quantization_config.fuse)
        # Else transformers refuses .half() and its Trainer all but adapters, which these layers,
        # and the dense ones beside them, take as they did before they were saved.
        model.is_quantized = False
        return model

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        """What ``save_pretrained`` of ``model`` saves: that of the model, whose configuration is
        brought up to date with its layers before it is written; ``args`` and ``kwargs`` are not
        read. Raises ValueError for layers that it cannot say, by their names."""
        if not getattr(model, "_hf_peft_config_loaded", False):  # saves adapters alone
            self._renew(model)
        # What is returned takes the place of the state_dict that save_pretrained was called with.
        frame = sys._getframe(1)
        is_save = frame.f_code.co_name == "save_pretrained"
        return (frame.f_locals.get("state_dict") if is_save else None), {}

    def _renew(self, model: Any) -> None:
        from kernlib.compat.loading import described

        modules, fuse = described(model)
        if not modules:
            self.remove_quantization_config(model)
            return
        self.quantization_config = KernlibConfig(modules, fuse)
        model.config.quantization_config = self.quantization_config

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        from kernlib.compat.loading import restored

        return restored(model, dtype)


@hinted
def attach(model: Any) -> list[str]:
    """Have ``model.save_pretrained`` say which layers are :class:`kernlib.nn.SparseLinear`, and
    return their names. :func:`kernlib.nn.sparsify` does this itself; models whose layers were put
    there by hand need it.

    - ``model``: a ``PreTrainedModel`` of transformers.

    Layers that are swapped later, or become dense again, count as they are when it is saved. Warns
    with a :class:`kernlib.KernlibWarning`, and returns the names, where the model has a
    ``quantization_config`` of another library, beside which transformers saves no second one.
    Raises TypeError for another model, ValueError for layers with an activation, which the
    configuration cannot say, and ImportError without transformers.
    """
    _check_installed()
    from kernlib.compat.loading import described

    if not isinstance(model, import_module("transformers.modeling_utils").PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, got {shown(type(model).__name__)}"
        )
    register()
    modules, fuse = described(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, KernlibQuantizer):
        method = getattr(quantizer.quantization_config, "quant_method", None)
        warn(
            f"{type(model).__name__} has the quantization_config of "
            f"{getattr(method, 'value', method)}, beside which save_pretrained stores none of "
            "kernlib: from_pretrained of what it saves does not load the layers that kernlib has "
            "swapped"
        )
        return modules
    if modules:
        # Into the config too: it is that of the models around this one, which are saved as a whole.
        config = KernlibConfig(modules, fuse)
        model.config.quantization_config = config
        model.hf_quantizer = KernlibQuantizer(config, pre_quantized=True)
    return modules


def _attach_all(model: Any) -> None:
    """Attach to the outermost models of transformers in a model."""
    loaded = sys.modules.get("transformers.modeling_utils")
    kind = getattr(loaded, "PreTrainedModel", None)
    if kind is None:
        return
    if isinstance(model, kind):
        attach(model)
        return
    for part in model.children():
        _attach_all(part)


def register() -> None:
    """Enter both classes in transformers under ``"kernlib"``, as importing kernlib does. Raises
    ImportError without transformers.

    Example:
        >>> kl.compat.transformers.register()  # doctest: +SKIP
    """
    _check_installed()
    auto = import_module(AWAITED)
    # Not by its decorators, which refuse the name after a reload. While transformers imports this
    # module's, nothing is there yet: the hook comes again.
    entries = {"AUTO_QUANTIZATION_CONFIG_MAPPING": KernlibConfig}
    entries["AUTO_QUANTIZER_MAPPING"] = KernlibQuantizer
    for mapping, kind in entries.items():
        getattr(auto, mapping, {})[NAME] = kind
    former = [tell for tell in AFTER_SWAPS if getattr(tell, "__module__", None) == __name__]
    for tell in former:
        AFTER_SWAPS.remove(tell)
    AFTER_SWAPS.append(_attach_all)


if MISSING is None:
    register()
