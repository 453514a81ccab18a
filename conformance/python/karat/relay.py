"""Stands between `karat`, which starts a program for every case, and the process whose kernel it judges."""

import socket
import sys

address, directory = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    connection.sendall(directory.encode() + b"\n")
    code = connection.recv(1)
try:
    with open(directory + "/error.txt") as said:
        sys.stderr.write(said.read())
except FileNotFoundError:
    pass
sys.exit(code[0] if code else 1)
