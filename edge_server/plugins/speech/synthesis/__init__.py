"""Text to speech: voices of Piper and Kokoro on ONNX Runtime, and OpenAI's API for them.

`speech_endpoint` answers a call, which `speech_request` parses and `audio_encoder` encodes. `voice_backend` opens a
model in a child process, where `espeak_phonemes` makes phonemes of a text, a sentence at a time, and a voice of `piper`
or `kokoro` makes samples of a sentence. The endpoint serves any model with the same inputs and outputs.
"""
