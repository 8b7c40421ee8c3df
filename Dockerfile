# One image for the SuperLink, the server app and the SuperNodes; see docs/deployment.md.
#   docker build -t fedfrozen .
# BASE_IMAGE    any Debian-like image with python3 >= 3.11 and its venv module
# TORCH_INDEX   where torch comes from; empty = PyPI (with CUDA: 7 GB; it runs on CPUs too);
#               https://download.pytorch.org/whl/cpu for an image without CUDA
ARG BASE_IMAGE=python:3.11-slim-bookworm

# --- dependencies: installed again only when pyproject.toml names others ------------------
FROM ${BASE_IMAGE} AS requirements
COPY deploy/requirements.py pyproject.toml /tmp/
RUN python3 /tmp/requirements.py /tmp/pyproject.toml > /tmp/requirements.txt

FROM ${BASE_IMAGE} AS dependencies
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/venv
COPY --from=requirements /tmp/requirements.txt /tmp/
RUN if [ -n "$TORCH_INDEX" ]; then \
      grep '^torch' /tmp/requirements.txt | xargs -d '\n' \
        /opt/venv/bin/pip install --quiet --index-url "$TORCH_INDEX"; \
    fi \
 && /opt/venv/bin/pip install --quiet -r /tmp/requirements.txt \
 && /opt/venv/bin/pip uninstall --quiet --yes pip setuptools \
 && site=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && echo /opt/fedfrozen > "$site/fedfrozen.pth"

# --- the package, as an app folder for `flwr run` too -------------------------------------
FROM ${BASE_IMAGE} AS package
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /tmp/build
WORKDIR /source
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY fedfrozen_app fedfrozen_app
RUN /tmp/build/bin/pip install --quiet --no-deps --target /opt/fedfrozen . \
 && cp pyproject.toml README.md LICENSE /opt/fedfrozen/ \
 && sed -i '1s|.*|#!/opt/venv/bin/python|' /opt/fedfrozen/bin/fedfrozen
COPY deploy /opt/fedfrozen/deploy

# --- what runs ------------------------------------------------------------------------------
FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --create-home --home-dir /home/fedfrozen --shell /usr/sbin/nologin fedfrozen \
 && install -d -o fedfrozen -g fedfrozen /state /runs /cache /claims /data /keys
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=package /opt/fedfrozen /opt/fedfrozen
ENV PATH=/opt/fedfrozen/deploy:/opt/venv/bin:/opt/fedfrozen/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FEDFROZEN_HOME=/runs \
    FLWR_HOME=/home/fedfrozen/.flwr \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_TELEMETRY_ENABLED=0
USER fedfrozen
WORKDIR /home/fedfrozen
