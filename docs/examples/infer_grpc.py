"""Send a tensor over gRPC: python infer_grpc.py [HOST:PORT]. Needs tritonclient[grpc]."""

import sys

import numpy as np
import tritonclient.grpc as triton

if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
    sys.exit("usage: python infer_grpc.py [HOST:PORT]")
address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
with triton.InferenceServerClient(address) as client:
    tensor = triton.InferInput("input", [1, 3, 224, 224], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 3, 224, 224), np.float32))
    result = client.infer("efficientnet_lite0", [tensor])
    print("probabilities", result.as_numpy("probabilities").shape)
