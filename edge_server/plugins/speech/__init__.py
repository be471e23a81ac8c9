"""Speech to text with Whisper models, text to speech in the folder `synthesis`, OpenAI's API for audio, and the Wyoming
protocol of Home Assistant.

A request enters in `endpoints` as a form with a file, which `transcription_request` parses, or on the port of the
folder `wyoming`. `model_call` asks the model, and `transcription_response` encodes the answer.
`whisper_backend` runs the model in a child process, which also decodes the file (`audio_file`). May import the core,
and of other plugins the parser of forms and OpenAI's form of errors.
"""
