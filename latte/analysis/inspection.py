"""Everything that is looked at in one text: one pass over it, in pieces."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from latte.analysis.measures import LayerMeasures, Meters
from latte.analysis.projections import CHUNK, LayerForm, Piece, Projected, layer_forms, read_pieces
from latte.analysis.records import DISTANCES, LayerRecord, Recorder, bytes_per_token
from latte.analysis.rows import LayerTrace, join

SHOWN = 16_384
"""Tokens that a report shows at most, unless told otherwise."""

REPORT_BYTES = 48 * 2**20
"""What a report keeps of all shown tokens at most, before it is compressed."""

DRAWN = 32
"""Tokens that figures of single tokens show."""


@dataclass(frozen=True)
class Inspection:
    """What was seen of a text: measures of all of it, records of the tokens that are shown, traces of the first few.

    Where tokens attend to later ones too, all are shown, and traces are of all.
    """

    tokens: int
    ids: list[int]  # of the shown tokens
    measures: list[LayerMeasures]
    records: list[LayerRecord]
    traces: list[LayerTrace]

    @property
    def has_latents(self) -> bool:
        return any(measured.usage is not None for measured in self.measures)


def inspect_tokens(
    model: nn.Module,
    tokens: Tensor,
    *,
    layers: list[int] | None = None,
    shown: int = SHOWN,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Read a text's tokens [T]; measure all layers, and record those of the numbers `layers` for `shown` tokens.

    Memory is that of a piece, of the records and, with full softmax attention, of the keys of all tokens.
    """
    forms = layer_forms(model)
    chosen = choose_layers(forms, layers)
    _check_shown(forms, shown, len(tokens))
    meters = Meters(model, len(tokens))
    recorders = {form.name: Recorder(form, min(shown, len(tokens))) for form in chosen}
    first: list[Piece] = []
    looks_back = all(form.causal for form in forms)
    for piece in read_pieces(model, tokens, chunk, progress):
        meters.add(piece)
        for name, recorder in recorders.items():
            recorder.add(piece.layers[name])
        if piece.start < DRAWN:  # what looks ahead needs all of the text, which is the first piece
            first.append(beginning(piece, DRAWN - piece.start if looks_back else len(tokens)))
    return Inspection(
        len(tokens), tokens[:shown].tolist(), meters.results(),
        [recorder.record() for recorder in recorders.values()],
        [LayerTrace(form, join([piece.layers[form.name] for piece in first])) for form in chosen],
    )  # fmt: skip


def _check_shown(forms: list[LayerForm], shown: int, tokens: int) -> None:
    if shown < tokens and not all(form.causal for form in forms):
        raise ValueError(
            f"shown is {shown} and the text has {tokens} tokens; the model reads both ways, so that what is shown "
            "attends to the rest: show all, or give less of the text"
        )
    if min(shown, tokens) > DISTANCES:
        raise ValueError(f"shown is {shown}; it must be at most {DISTANCES}")


def choose_layers(forms: list[LayerForm], numbers: list[int] | None) -> list[LayerForm]:
    if numbers is None:
        return forms
    for number in numbers:
        if not 0 <= number < len(forms):
            raise ValueError(f"there is no layer {number}; the model has layers 0 to {len(forms) - 1}")
    return [forms[number] for number in numbers]


def shown_tokens(model: nn.Module, layers: list[int] | None, wanted: int) -> int:
    """How many tokens a report can show, `wanted` at most, for what it keeps of them to stay within REPORT_BYTES."""
    return max(1, min(wanted, REPORT_BYTES // bytes_per_token(choose_layers(layer_forms(model), layers))))


def beginning(piece: Piece, tokens: int) -> Piece:
    return Piece(
        piece.start,
        {
            name: Projected(*(None if x is None else x[:tokens].clone() for x in projected))
            for name, projected in piece.layers.items()
        },
    )
