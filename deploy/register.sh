#!/usr/bin/env bash
# Tell the SuperLink which SuperNodes to let in: every KEYS/nodes/*.pub. Safe to run again.
# Variables as in flwr.sh.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")") failed=0
for key in "${KEYS:-keys}"/nodes/*.pub; do
  name=$(basename "$key" .pub)
  if out=$("$here/flwr.sh" supernode register "$key" prod --name "$name" 2>&1); then
    echo "registered $name"
  elif grep -qi "already" <<<"$out"; then
    echo "$name is registered already"
  else
    echo "$name: $out" >&2
    failed=1
  fi
done
exit $failed
