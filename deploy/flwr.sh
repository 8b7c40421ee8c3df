#!/usr/bin/env bash
# `flwr` with a connection named prod to the SuperLink: flwr.sh run . prod --stream
#   KEYS       folder with ca.crt                                                      keys
#   SUPERLINK  host:port of the SuperLink, by a name of its certificate     127.0.0.1:8000
#   FLWR_HOME  where flwr keeps the connection; other connections in it stay    ~/.flwr
set -euo pipefail
home=${FLWR_HOME:-$HOME/.flwr} keys=$(cd "${KEYS:-keys}" && pwd)
config=$home/config.toml
mkdir -p "$home"
if ! grep -qsF '[superlink.prod]' "$config"; then
  cat >>"$config" <<TOML

[superlink.prod]
address = "${SUPERLINK:-127.0.0.1:8000}"
root-certificates = "$keys/ca.crt"
TOML
fi
exec flwr "$@"
