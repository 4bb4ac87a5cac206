# A server for one model on a CPU:  docker build -t vitrail .  and  docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs/photos:/model:ro" vitrail
# torch's CPU build is smaller than the default one: pass the address of an index that has it as --build-arg TORCH_INDEX=...
FROM python:3.12-slim
ARG TORCH_INDEX=""
WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY vitrail ./vitrail
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt '.[fast,serve]' \
    && useradd --system --uid 10001 --create-home vitrail
USER vitrail
WORKDIR /home/vitrail
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["vitrail", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/model"]
