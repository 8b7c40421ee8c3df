#!/usr/bin/env bash
# The SuperLink: TLS, only registered SuperNodes, server apps in a process of their own.
#   KEYS      folder made by `fedfrozen keys` (ca.crt and server/ are read)         keys
#   STATE     folder of the database: nodes, runs, messages                        state
#   DATABASE  its file, or :flwr-in-memory:                           STATE/superlink.db
#   HOST      address to listen on; 0.0.0.0 for other machines to reach it     127.0.0.1
#   PORT      the one port of nodes, server app and flwr                            8000
set -euo pipefail
keys=${KEYS:-keys} state=${STATE:-state}
mkdir -p "$state"
exec python "$(dirname "$(readlink -f "$0")")/superlink.py" \
  --ssl-ca-certfile "$keys/ca.crt" \
  --ssl-certfile "$keys/server/server.pem" \
  --ssl-keyfile "$keys/server/server.key" \
  --superexec-auth-secret-file "$keys/server/superexec.secret" \
  --enable-supernode-auth \
  --isolation process \
  --disable-runtime-dependency-installation \
  --database "${DATABASE:-$state/superlink.db}" \
  --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}"
