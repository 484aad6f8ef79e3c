"""``ModelConfig`` and ``TransformerConfig``: what the configurations of all models, and of all with tokens, have.

Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..base.errors import nearest
from ..grid.ranges import check_units
from ..options.base import REQUIRED, Declared, check_options, option
from .presets import Presets

if TYPE_CHECKING:
    from ..pipe.spec import LayerSpec


@dataclass(frozen=True, repr=False)
class ModelConfig(Declared):
    """Methods and checks that the configurations of all models share.

    A subclass may give an inherited field another default, as ``hidden_size: int = 8``: meaning and limits stay.

    Raises:
        ValueError: a field has another type, or a value out of its limits.
    """

    PRESETS: ClassVar[Presets] = {}
    SHARDED: ClassVar[tuple[str, ...]] = ("num_attention_heads",)  # over the tensor axis
    LAYERS: ClassVar[str] = ""  # module and name of the function of the layers, which needs torch
    NO_SLICES: ClassVar[str | None] = None  # reason why a pipeline cannot cut sequences of any such model into slices

    def __init_subclass__(cls, **kwargs: Any) -> None:
        inherited: dict[str, Field[Any]] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited |= getattr(base, "__dataclass_fields__", {})
        for name in inherited.keys() & cls.__annotations__.keys() & vars(cls).keys():
            if not isinstance(value := vars(cls)[name], Field):
                same: Any = {"kw_only": inherited[name].kw_only, "metadata": inherited[name].metadata}
                setattr(cls, name, field(default=value, **same))
        super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        check_options(self)

    def __repr__(self) -> str:
        """Return a call that makes the configuration, without the fields that have their defaults."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        changed = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({changed})"

    def _set(self, **values: Any) -> None:
        """Give fields the values that follow from others: one configuration is written in one way."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def settings(cls) -> list[str]:
        """List the names of the fields."""
        return [field.name for field in fields(cls)]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Make a published configuration or a small one for tests by name, with the given fields changed.

        >>> triax.GPTConfig.preset("gpt2").parameter_count
        124439808
        >>> triax.LlamaConfig.preset("llama3-8b").parameter_count
        8030261248

        Raises:
            ValueError: the name is unknown; the message has the nearest one.
            TypeError: a field is unknown; the message has the nearest one.
        """
        if name not in cls.PRESETS:
            raise ValueError(f"there is no preset {name!r}; {nearest(name, cls.PRESETS)}")
        known = cls.settings()
        if unknown := sorted(set(changes) - set(known)):
            raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}; {nearest(unknown[0], known)}")
        return cls(**cls.PRESETS[name] | changes)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """List the names of the presets that ``preset`` accepts."""
        return tuple(cls.PRESETS)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, of all experts, a tied one counted once: those of the layers, on the meta device."""
        count: int = import_module(".shapes", __package__).parameter_count(self)
        return count

    def layers(self, **options: Any) -> list[LayerSpec]:
        """List the specs of the model's layers, as ``decoder_layers`` and its like do, with their options."""
        module, name = self.LAYERS.split(":")
        specs: list[LayerSpec] = getattr(import_module(f".{module}", __package__), name)(self, **options)
        return specs

    def check_tensor(self, tensor: int) -> None:
        """Check that a tensor axis of size ``tensor`` can shard this model, before any process starts.

        Raises:
            ValueError: the size exceeds a number of ``SHARDED``, such as the number of heads or the vocabulary.
        """
        for name in (name for name in self.SHARDED if name not in self._unused):
            check_units(name, getattr(self, name), 1, tensor)

    @property
    def _unused(self) -> tuple[str, ...]:
        """Names of the sizes that no layer has."""
        return ()

    def refuses_slices(self, experts: Mapping[str, Any] | None = None) -> str | None:
        """Return the reason why a pipeline cannot cut sequences of the model into slices; None if it can.

        Args:
            experts: further arguments of its mixtures of experts, such as ``balance``.
        """
        return self.NO_SLICES


@dataclass(frozen=True, repr=False)
class TransformerConfig(ModelConfig):
    """Fields that the configurations of all models with tokens share; otherwise as ``ModelConfig``."""

    SHARDED: ClassVar[tuple[str, ...]] = ("num_attention_heads", "vocab_size")  # over the tensor axis
    EPSILON: ClassVar[str] = "rms_norm_eps"  # the field with the epsilon of the norms

    vocab_size: int = option(REQUIRED, "Number of different tokens. The tensor axis need not divide it.", least=1)
    max_position_embeddings: int = option(REQUIRED, "Length of the longest sequence, in tokens.", least=1)
    hidden_size: int = option(REQUIRED, "Width of the residual stream.", least=1)
    num_hidden_layers: int = option(REQUIRED, "Number of blocks.", least=1)
    num_attention_heads: int = option(REQUIRED, "Number of query heads, at least the size of the tensor axis.", least=1)
    _: KW_ONLY
    dropout: float = option(
        0.0,
        "Dropout probability of the embeddings and of each residual branch's output.",
        least=0.0,
        below=1.0,
    )
    tie_word_embeddings: bool = option(False, "Output layer and token embedding share one weight.")
    initializer_range: float = option(
        0.02,
        "Standard deviation of the initial weights. The last weight of a residual branch has initializer_range / "
        "sqrt(2 num_hidden_layers) (Radford et al. 2019, section 2.3). Biases start at 0.",
    )
    sliding_window: int | None = option(
        None, "Tokens that a token attends to, itself included; None: all before it.", least=1
    )

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers: embedding, learned positions if any, blocks, norm, head."""
        return self.num_hidden_layers + 3

    @property
    def norm_epsilon(self) -> float:
        """Epsilon of the norms."""
        return float(getattr(self, self.EPSILON))

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the last weight of each residual branch; a block has two such branches."""
        return float(self.initializer_range / (2 * self.num_hidden_layers) ** 0.5)


def whole_experts(own: Mapping[str, Any], given: Mapping[str, Any] | None) -> str | None:
    """Return the reason why mixtures of experts need whole sequences; None if they do not."""
    arguments = {"z_loss": 0.0, "capacity": None, **own, **(given or {})}
    balance = arguments["balance"] or ()
    losses = {balance} if isinstance(balance, str) else {*balance}
    if losses - {"bias"} or arguments["z_loss"] or arguments["capacity"] is not None:
        return (
            "has a mixture of experts with a loss or a limit of whole sequences (z_loss, capacity, or another balance "
            "than bias)"
        )
    return None


def check_experts(name: str, experts: int, chosen: int, groups: int, limit: int) -> None:
    """Check that a token's experts can be chosen.

    Args:
        name: name of the field with the number of experts.
        experts, chosen: number of experts, and of those of a token.
        groups, limit: number of groups of experts, and of those from which a token's experts are chosen.

    Raises:
        ValueError: they cannot.
    """
    if chosen > experts:
        raise ValueError(
            f"num_experts_per_tok is {chosen}, but there are {experts} experts. Give 1 to {experts} experts per token."
        )
    size, rest = divmod(experts, groups)
    if rest or limit > groups or limit * size < chosen:
        raise ValueError(
            f"num_experts_per_tok={chosen} of {name}={experts} cannot be chosen from topk_group={limit} of "
            f"n_group={groups} equal groups. Give a divisor of {experts} as n_group, and a larger topk_group, at most "
            "n_group."
        )
