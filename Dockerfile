# docker build -t datalens . && docker run --rm -v "$PWD/work:/work" datalens train --data digits --epsilon 1 --out runs/a
# On a CPU. What is mounted at /work must be writable for user 1000; runs there are as private as the data.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheel

FROM python:3.12-slim
COPY --from=build /wheel/*.whl /wheel/
RUN pip install --no-cache-dir /wheel/*.whl && rm -r /wheel \
 && useradd --create-home --uid 1000 datalens
USER datalens
WORKDIR /work
ENTRYPOINT ["datalens"]
CMD ["--help"]
