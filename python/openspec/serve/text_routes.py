"""Endpoints that use the tokenizer alone."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve.chat_prompt import render_chat
from openspec.serve.context import ServerContext
from openspec.serve.handling import json_response, receive_json
from openspec.serve.request_models import DetokenizeRequest, TokenizeRequest
from openspec.text.tokenizer import Tokenizer


async def tokenize(context: ServerContext, request: Request) -> Response:
    """POST /tokenize."""
    body, num_bytes = await receive_json(context, request, TokenizeRequest)
    context.check_model(body.model)
    tokenizer = context.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", "prompt")

    def answer() -> Response:
        if body.prompt is None:
            token_ids = render_chat(tokenizer, body).token_ids
        else:
            adds_special = body.add_special_tokens is not False
            token_ids = tokenizer.encode(
                body.prompt, parse_special=True, add_special_tokens=adds_special
            )
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": context.engine.info.max_model_len,
                "tokens": token_ids,
                "token_strs": [tokenizer.token_text(token_id) for token_id in token_ids]
                if body.return_token_strs
                else None,
            }
        )

    return await context.text_pool.run(num_bytes, answer)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """POST /detokenize."""
    body, _ = await receive_json(context, request, DetokenizeRequest)
    context.check_model(body.model)
    tokens = body.tokens

    def decode() -> str:
        context.tokenizer.check_token_ids(tokens, "tokens")
        return context.tokenizer.decode(tokens, skip_special_tokens=False)

    return json_response({"prompt": await context.text_pool.run(len(tokens) * 8, decode)})


async def tokenizer_info(context: ServerContext, _: Request) -> Response:
    """GET /tokenizer_info: what evaluation harnesses need to know of a remote tokenizer."""
    tokenizer = context.tokenizer
    return json_response(
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "vocab_size": tokenizer.num_tokens,
            "model_max_length": context.engine.info.max_model_len,
            "eos_token": _text(tokenizer, tokenizer.eos_token_id),
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token": _text(tokenizer, tokenizer.bos_token_id),
            "bos_token_id": tokenizer.bos_token_id,
            "pad_token": _text(tokenizer, tokenizer.eos_token_id),
            "add_bos_token": False,
            "has_chat_template": tokenizer.has_chat_template,
            "special_tokens": dict(tokenizer.special_tokens),
        }
    )


def _text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)
