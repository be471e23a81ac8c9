"""Entry module of the plugin `speech`: declares the backends of speech models, OpenAI's API for audio, and the port of
the Wyoming protocol with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.config.setting import BOOLEAN, OPTIONAL_ADDRESS, SettingTable, setting
from edge_server.plugin import ModelFormat, Plugin, RunningPlugin

if TYPE_CHECKING:
    import asyncio

    from edge_server.config import ServerConfig
    from edge_server.frontends.http.routes import Route
    from edge_server.plugin import ServingCore
    from edge_server.plugins.speech.wyoming.announcement import WyomingAnnouncement
    from edge_server.plugins.speech.wyoming.port import WyomingPort

_PORT_STOP_S = 2.0

VOICES_OF_KOKORO = ("voices.npz", "voices.bin", "voices-v1.0.bin")
"""Files with the voices of Kokoro, beside its ONNX file."""


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """Speech for home assistants."""

    wyoming: str = setting(
        "",
        "--wyoming",
        OPTIONAL_ADDRESS,
        "Serve speech to Home Assistant's Assist at this address, by the Wyoming protocol. It asks for no key.",
    )
    announces_wyoming: bool = setting(
        False,
        "--wyoming-announce",
        BOOLEAN,
        "Announce that address by multicast DNS, by which Home Assistant finds it. Needs the extra zeroconf.",
    )


class SpeechPlugin(Plugin):
    name = "speech"
    tables = (SettingTable("speech", "Speech", SpeechConfig),)
    backends = MappingProxyType(
        {
            "kokoro": "edge_server.plugins.speech.synthesis.kokoro",
            "openvino_whisper": "edge_server.plugins.speech.whisper_backend",
            "piper": "edge_server.plugins.speech.synthesis.piper",
        }
    )
    model_formats = (
        # Before the tokenizer that lies beside it too.
        ModelFormat("openvino_encoder_model.xml", ("openvino_whisper",), rank=2, beside="openvino_decoder_model.xml"),
        ModelFormat("model.onnx.json", ("piper",), rank=1, beside="model.onnx", ending=".onnx.json"),
        *(ModelFormat(name, ("kokoro",), rank=1, beside="model.onnx") for name in VOICES_OF_KOKORO),
    )
    data_backends = ("openvino_whisper",)

    def parameter_names(self) -> Iterable[str]:
        return (
            "languages", "length_scale", "max_audio_s", "max_text_characters", "niceness", "noise_scale", "noise_w",
            "vad", "voices",
        )  # fmt: skip

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Speech(config.table(SpeechConfig))


class _Speech(RunningPlugin):
    def __init__(self, settings: SpeechConfig) -> None:
        self._settings = settings
        self._port: WyomingPort | None = None
        self._announcement: WyomingAnnouncement | None = None
        self._starting: asyncio.Task[None] | None = None

    def build(self, core: ServingCore) -> None:
        self._core = core

    def routes(self) -> Sequence[Route]:
        from edge_server.plugins.speech.routes import speech_routes

        return speech_routes(self._core.service, self._core.access.may_change_models)

    def start(self) -> None:
        """Raises InvalidRequest if clients of Wyoming would need a key or a certificate, ServingFault for an address in
        use, and BackendMissing if the port is to be announced without the package for it."""
        from edge_server.errors import InvalidRequest

        if not self._settings.wyoming:
            if self._settings.announces_wyoming:
                raise InvalidRequest("--wyoming-announce: expected --wyoming=HOST:PORT beside it")
            return
        import asyncio

        from edge_server.frontends.access_control import check_plugin_port
        from edge_server.plugins.speech.wyoming.port import WyomingPort
        from edge_server.plugins.speech.wyoming.speech_to_text import SpeechToText
        from edge_server.plugins.speech.wyoming.text_to_speech import TextToSpeech

        address, access = self._settings.wyoming, self._core.access

        def needs_key() -> bool:
            return access.is_guarded("inference")

        check_plugin_port(self._core.config, "--wyoming", address, "Wyoming", needs_key=needs_key(), sends_key=False)
        self._loop = asyncio.get_running_loop()
        service = self._core.service
        self._port = WyomingPort(address, [SpeechToText(service), TextToSpeech(service)], needs_key)
        if self._settings.announces_wyoming:
            from edge_server.plugins.speech.wyoming.announcement import WyomingAnnouncement

            self._announcement = WyomingAnnouncement(address.rpartition(":")[0].strip("[]"), self._port.port)

    def addresses(self) -> Sequence[str]:
        return () if self._port is None else (f"Wyoming {self._port.address}",)

    def models_settled(self) -> None:
        # Not earlier: Home Assistant asks once which models there are.
        if self._port is not None:
            self._starting = self._loop.create_task(self._answer(self._port))

    async def _answer(self, port: WyomingPort) -> None:
        await port.start()
        if self._announcement is not None:
            await self._announcement.start()

    def begin_stop(self) -> None:
        if self._port is not None:
            self._loop.call_soon_threadsafe(self._port.stop_listening)

    def stop(self, timeout_s: float) -> None:
        if self._port is not None:
            import asyncio

            asyncio.run_coroutine_threadsafe(self._end(self._port), self._loop).result(_PORT_STOP_S)

    async def _end(self, port: WyomingPort) -> None:
        if self._announcement is not None:
            await self._announcement.stop()
        await port.stop()


PLUGIN = SpeechPlugin()
