"""Speech to text: Whisper models on the CPU, and OpenAI's API for audio.

A request enters in `endpoints` as a form with a file; `transcription_request` parses it, and `transcription_response`
encodes the answer. `whisper_backend` runs the model in a child process, which also decodes the file (`audio_file`). May
import the core, and of other plugins the parser of forms and OpenAI's form of errors.
"""
