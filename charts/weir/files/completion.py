"""Ask the server at URL for one completion until it comes: `completion.py URL SECONDS`. Exit status 0 once it did."""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request

url, seconds = sys.argv[1], float(sys.argv[2])
body = json.dumps({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}).encode()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the Service, whatever proxy the environment names
deadline, last = time.monotonic() + seconds, "nothing was tried"
while time.monotonic() < deadline:
    try:
        request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
        with opener.open(request, timeout=30) as answer:
            found = json.load(answer)
        if found["usage"]["completion_tokens"] > 0:
            print(f"a completion from {url}: {found['choices'][0]['text']!r}")
            sys.exit(0)
        last = f"an empty completion: {found}"
    except urllib.error.HTTPError as e:
        last = f"status {e.code}: {e.read(300).decode(errors='replace')}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as e:
        last = f"{type(e).__name__}: {e}"
    time.sleep(1)
print(f"no completion from {url} within {seconds:g} s; last: {last}", file=sys.stderr)
sys.exit(1)
