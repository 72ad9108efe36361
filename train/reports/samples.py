"""Answers with every token marked: accepted from the draft, and at which position of it, or written by the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from infer.stopping import TextStream, Tokenizer

PROMPT_CHARACTERS = 400
"""Of a longer prompt the end is shown."""
DEEPEST_MARK = 5


@dataclass(frozen=True, kw_only=True)
class Sample:
    """pieces: (text, position) of each token in turn; position 0 is the target's own, d the d-th token of a draft.

    The first token is the prefill's. simulated: marked by what the training graph would have drafted.
    """

    prompt: str
    domain: str
    temperature: float
    pieces: tuple[tuple[str, int], ...]
    simulated: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        round_lengths: Sequence[int],
        domain: str,
        temperature: float,
        simulated: bool = False,
    ) -> Sample:
        """`round_lengths`: tokens emitted by each round after the prefill, the target's own at the end of each."""
        stream = TextStream(tokenizer)
        texts = [stream.push([token]) for token in token_ids]
        if texts:
            texts[-1] += stream.flush()
        prompt = TextStream(tokenizer)
        return cls(
            prompt=(prompt.push(prompt_ids) + prompt.flush())[-PROMPT_CHARACTERS:],
            domain=domain,
            temperature=temperature,
            pieces=tuple(zip(texts, marks(round_lengths), strict=True)),
            simulated=simulated,
        )

    @property
    def share_drafted(self) -> float:
        return sum(position > 0 for _, position in self.pieces) / len(self.pieces) if self.pieces else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "domain": self.domain,
            "temperature": self.temperature,
            "simulated": self.simulated,
            "pieces": [list(piece) for piece in self.pieces],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        return cls(**{**values, "pieces": tuple((str(text), int(position)) for text, position in values["pieces"])})

    def to_html(self) -> str:
        """The prompt and the marked answer; `SAMPLE_STYLE` gives the marks their colours."""
        head = f"{escape(self.domain)}, temperature {self.temperature:g}, {self.share_drafted:.0%} of tokens drafted"
        return (
            f'<figure class="sample"><figcaption>{head}{" (simulated)" if self.simulated else ""}</figcaption>'
            f'<p class="prompt">{escape(self.prompt)}</p><p class="answer">{"".join(_marked(self.pieces))}</p></figure>'
        )


def marks(round_lengths: Sequence[int]) -> list[int]:
    """The position of every token of an answer; the prefill's token comes first."""
    return [0, *(place for length in round_lengths for place in (*range(1, length), 0))]


def _marked(pieces: Sequence[tuple[str, int]]) -> Iterator[str]:
    for text, position in pieces:
        if position:
            shade = f"d{min(position, DEEPEST_MARK)}"
            yield f'<mark class="{shade}" title="draft position {position}">{escape(text)}</mark>'
        else:
            yield escape(text)


SAMPLE_LEGEND = "Green: accepted from the draft, the deeper the later in it. Plain: written by the target."
SAMPLE_STYLE = """
.sample { margin: 0 0 1.2em; }
.sample figcaption { font-size: .85em; opacity: .7; margin-bottom: .3em; }
.sample p { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .55em .8em; border-radius: 6px; }
.sample .prompt { font-size: .85em; opacity: .75; border: 1px solid rgba(128, 128, 128, .35); margin-bottom: .35em; }
.sample .answer { background: rgba(128, 128, 128, .09); line-height: 1.65; }
.sample mark { color: inherit; border-radius: 3px; padding: .1em 0; }
.sample mark.d1 { background: rgba(46, 160, 110, .24); }
.sample mark.d2 { background: rgba(46, 160, 110, .38); }
.sample mark.d3 { background: rgba(46, 160, 110, .52); }
.sample mark.d4 { background: rgba(46, 160, 110, .66); }
.sample mark.d5 { background: rgba(46, 160, 110, .8); }
"""


def samples_page(samples: Sequence[Sample]) -> str:
    """A page of its own, for trackers."""
    body = "".join(sample.to_html() for sample in samples)
    return (
        "<!doctype html><meta charset=utf-8><meta name=color-scheme content='light dark'>"
        f"<style>body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1em; }}{SAMPLE_STYLE}</style>"
        f"<p>{SAMPLE_LEGEND}</p>{body}"
    )
