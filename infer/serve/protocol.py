"""What clients may ask, field by field (`infer.serve.reading` makes such requests of bodies).

The fields are OpenAI's, vLLM's beside them, and headstart's own (`draft`, `acceptance`, `tree`, `tag`). A field that is
not here is refused by name; a field whose only value here does nothing (`store: false`) is taken with that value. Null
is like absent everywhere. What requests mean to the engine is said in `infer.serve.prepare`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticKnownError

from infer.serve.settings import MAX_TOP_LOGPROBS

_SEEDS = 1 << 63
_MAX_ID = (1 << 31) - 1


def _bool(value: Any) -> bool:
    """To Python, and so to a literal, 0 is False and 1 is True; to a client they are not."""
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


OnlyTrue = Annotated[Literal[True], BeforeValidator(_bool)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_bool)]
OnlyOne = Annotated[Literal[1], BeforeValidator(_int)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_ID)]
# Lists may be long: the first mistake in one is enough.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=_MAX_ID)]
Name = Annotated[str, StringConstraints(max_length=256)]
DecimalKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
Biases = Annotated[dict[DecimalKey, float], Field(json_schema_extra={"additionalProperties": False})]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class TextPart(_Model):
    type: Literal["text"]
    text: str


class FunctionCall(_Model):
    name: str
    arguments: str


class ToolCall(_Model):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall


class ChatMessage(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Model):
    type: Literal["function"]
    function: Function


class JsonSchema(_Model):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Model):
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(_Model):
    include_usage: bool | None = None


class DraftOptions(_Model):
    max_nodes: Count | None = None
    max_depth: Count | None = None


class SamplingFields(_Model):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = Field(default=None, description="whose request it is: slots are shared fairly among users")
    metadata: dict[str, str] | None = Field(default=None, description="taken, and not used")

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_MAX_ID, description="0 and -1 turn it off")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    n: int | None = Field(default=None, ge=1, le=_MAX_ID)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=_MAX_ID)
    logit_bias: Biases | None = None
    bad_words: Texts | None = None

    max_tokens: Count | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=_MAX_ID)
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    draft: bool | DraftOptions | None = Field(default=None, description="this request's drafting")
    acceptance: bool | None = Field(default=None, description="tell which tokens were drafted and accepted")
    tree: bool | None = Field(default=None, description="tell each round's draft tree (streamed, with acceptance)")
    tag: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        default=None, description="a domain, for acceptance statistics"
    )

    # Fields that do nothing with the only value that they may have.
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None
    best_of: OnlyOne | None = None
    use_beam_search: OnlyFalse | None = None
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: OnlyTrue | None = None
    include_stop_str_in_output: OnlyFalse | None = None


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: OnlyTrue | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None


class CompletionRequest(SamplingFields):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(_Model):
    """`prompt`, or `messages` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: TokenIds
