"""The systems DataLens is compared with: what each will do, from public facts. How it does it is in `methods/`."""
