"""Split texts into words, numbers, signs and spaces, with one response per token."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

TOKEN = re.compile(r"[^\W\d]+|\d+|\s+|.", re.DOTALL)


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("token_streams", "Texts being split", pb_utils.MetricFamily.GAUGE)
        self.at_work = family.Metric({"model": args["model_name"]})
        self.threads = []

    def execute(self, requests):
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0]
            again = json.loads(request.parameters()).get("over_and_over", False)
            thread = threading.Thread(target=self.split, args=(request.get_response_sender(), text, again))
            self.threads.append(thread)
            thread.start()

    def split(self, sender, text, again):
        self.at_work.increment(1)
        try:
            for token in tokens(text.decode(), again):
                if sender.is_cancelled():
                    break
                sender.send(
                    pb_utils.InferenceResponse(
                        [
                            pb_utils.Tensor("TOKEN", np.array([token[0].encode()], dtype=np.object_)),
                            pb_utils.Tensor("BEGIN", np.array([token.start()], np.int32)),
                        ]
                    )
                )
        except UnicodeDecodeError as error:
            problem = pb_utils.TritonError(f"TEXT is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=problem))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.at_work.increment(-1)

    def finalize(self):
        for thread in self.threads:
            thread.join()


def tokens(text, again):
    """Yield the matches of all tokens of a text; with `again`, of the same text for ever."""
    yield from TOKEN.finditer(text)
    while again:
        yield from TOKEN.finditer(text)
