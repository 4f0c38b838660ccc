#!/usr/bin/env python3
"""Runs a program for WebAssembly by wasmtime (PyPI): tests/wasm.py PROGRAM FOLDER. The program works in FOLDER
and prints to standard output."""
import os
import sys

import wasmtime

program, folder = (os.path.abspath(path) for path in sys.argv[1:3])
wasi = wasmtime.WasiConfig()
wasi.argv = [program]
wasi.inherit_stdout()
wasi.inherit_stderr()
wasi.preopen_dir(folder, ".")
engine = wasmtime.Engine()
store = wasmtime.Store(engine)
store.set_wasi(wasi)
linker = wasmtime.Linker(engine)
linker.define_wasi()
instance = linker.instantiate(store, wasmtime.Module.from_file(engine, program))
try:
    instance.exports(store)["_start"](store)
except wasmtime.ExitTrap as end:
    sys.exit(end.code)
