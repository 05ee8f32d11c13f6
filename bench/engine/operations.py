"""Everything but inference: models and adapters, token ids, health, metrics, cache control and the test switches."""

from typing import TYPE_CHECKING

from aiohttp import web

from bench.engine import answers, metrics, server_info, tokenizer
from bench.engine.answers import json_response
from bench.engine.protocol import ApiError, invalid

if TYPE_CHECKING:
    from bench.engine.http import Api


class Operations:
    """Handlers beside `Api`, on the same server."""

    def __init__(self, api: "Api") -> None:
        self._api = api

    def add_to(self, app: web.Application) -> None:
        get, post = app.router.add_get, app.router.add_post
        post("/v1/load_lora_adapter", self._load_lora)
        post("/v1/unload_lora_adapter", self._unload_lora)
        get("/v1/models", self._models)
        post("/tokenize", self._tokenize)
        post("/detokenize", self._detokenize)
        get("/health", self._health)
        get("/ping", self._health)
        post("/ping", self._health)
        get("/version", self._version)
        get("/load", self._load)
        get("/metrics", self._metrics)
        get("/kv_event_sources", self._event_sources)
        if self._api.server.config.dev_mode:
            get("/server_info", self._server_info)
            post("/reset_prefix_cache", self._reset_prefix_cache)
            post("/sleep", self._sleep)
            post("/wake_up", self._wake_up)
            get("/is_sleeping", self._is_sleeping)
        post("/fake/faults", self._set_faults)
        post("/fake/restart", self._restart)

    # --- models, tokens ---------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        server = self._api.server
        config, created = server.config, int(server.started)
        root = config.root or config.model
        limit = config.engine.max_model_len
        cards = [answers.model_card(name, root, None, limit, created) for name in (config.model, *config.aliases)]
        cards += [answers.model_card(name, path, config.model, None, created) for name, path in server.adapters.items()]
        return json_response({"object": "list", "data": cards})

    async def _load_lora(self, request: web.Request) -> web.Response:
        body = await self._api.body(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self._api.server.models:
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            raise ApiError(400, message + "set 'load_inplace' to True.", "InvalidUserInput")
        self._api.server.add_adapter(name, path)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora(self, request: web.Request) -> web.Response:
        name = (await self._api.body(request)).get("lora_name")
        if not isinstance(name, str) or name not in self._api.server.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        self._api.server.remove_adapter(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._api.body(request)
        self._api.model(body.get("model"))
        ids = self._api.parser.prompt_of(body["prompt"]) if "prompt" in body else self._api.parser.chat_prompt(body)
        strings = tokenizer.token_strings(ids) if body.get("return_token_strs") is True else None
        limit = self._api.server.config.engine.max_model_len
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._api.body(request)
        self._api.model(body.get("model"))
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise invalid("missing", "tokens", "Field required", tokens)
        return json_response({"prompt": tokenizer.decode(self._api.parser.prompt_of(tokens))})

    # --- operations -------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._api.server.dead else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._api.server.config.version})

    async def _load(self, _: web.Request) -> web.Response:
        return json_response({"server_load": 0})

    async def _metrics(self, _: web.Request) -> web.Response:
        server = self._api.server
        text = metrics.exposition(server.config, server.drivers, server.nixl, server.started, server.sleep_level)
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _event_sources(self, _: web.Request) -> web.Response:
        return json_response(self._api.server.event_sources())

    async def _server_info(self, request: web.Request) -> web.Response:
        return json_response(server_info.answer(self._api.server, request.query.get("config_format", "text")))

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self._api.server.reset_prefix_cache()
        return web.Response()

    async def _sleep(self, request: web.Request) -> web.Response:
        self._api.server.sleep(int(request.query.get("level", "1")))
        return web.Response()

    async def _wake_up(self, _: web.Request) -> web.Response:
        self._api.server.sleep(None)
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._api.server.sleep_level is not None})

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self._api.server.faults.update(await self._api.body(request))
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        self._api.server.apply_faults()
        return web.Response()

    async def _restart(self, _: web.Request) -> web.Response:
        self._api.server.restart_soon()
        return web.Response(status=202)
