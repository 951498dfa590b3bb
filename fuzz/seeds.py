"""Seeds: the cases of tests/cases/harmony as the parser's target reads them, one frame of each kind, and a tokenizer of a few tokens."""

import json
import pathlib

here = pathlib.Path(__file__).parent
corpus = here / "corpus"
for kind in ("parse", "stream"):
    for path in sorted((here / "../tests/cases/harmony" / kind).glob("*.json")):
        case = json.loads(path.read_text())
        # The first byte chooses tools, the open role and the reason to finish.
        (corpus / "harmony_parser" / f"{kind}-{path.stem}").write_bytes(b"\x01" + case["input"]["text"].encode())
for kind in range(1, 12):
    (corpus / "kv_frame" / f"kind-{kind}").write_bytes(bytes([1, kind, 40]) + bytes(range(60)))
tokenizer = json.loads((here / "../shared/model/gpt-oss-nano/tokenizer.json").read_text())
tokens = dict(sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])[:256])
tokenizer["model"] |= {"vocab": tokens, "merges": []}
tokenizer["added_tokens"] = [token | {"id": 256 + i} for i, token in enumerate(tokenizer["added_tokens"][:2])]
(corpus / "tokenizer_json" / "bytes-only").write_text(json.dumps(tokenizer, ensure_ascii=False))
