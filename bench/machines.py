#!/usr/bin/env python3
"""Trains on machines of its own making: network namespaces of this machine, each with a link of --mbit
million bits a second in each direction, and --delay microseconds from each to each. mpirun starts one process
of build/mpi/machines (bench/machines.c) on each machine, which prints the time of a step and the forecast
of its plan. The parameters must then be the same, to the bit, as those of the same number of ranks in one
process.

    make MPI=1 B=build/mpi build/mpi/machines && python3 bench/machines.py
    python3 bench/machines.py --machines 4 -- --zero 3 --batch 8

Options after -- go to build/mpi/machines; without them, some ways to share a step are tried. Needs Linux,
root (for `ip netns` and /dev/net/tun) and Open MPI. `carry` does the work of Linux's netem, which some
kernels lack: packets wait for the sender's link, take their time on the link, and arrive after the delay.
Standard library only.
"""
import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454ca, 0x0001, 0x1000
MTU = 9000      # bytes of a packet: jumbo frames, so that a busy CPU carries few packets
# QUEUE: bytes that wait for a link. The sender's kernel holds WAITING more packets and drops further packets.
QUEUE = 1 << 15
WAITING = 16
NETWORK = "10.77.0"
WAYS = [["--zero", zero] for zero in "123"]


def name(k):
    return f"tt{os.getpid()}-{k}"


def call(*command):
    subprocess.run(command, check=True)


def open_link(k):
    """Opens a tunnel in the network namespace of machine k. The tunnel yields the packets that the
    namespace's kernel sends."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{name(k)}") as there:
        if libc.setns(there.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        link = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(link, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
        libc.setns(home.fileno(), 0)
    inside = ("ip", "netns", "exec", name(k), "ip")
    call(*inside, "link", "set", "lo", "up")
    call(*inside, "addr", "add", f"{NETWORK}.{k + 1}/24", "dev", "tun0")
    call(*inside, "link", "set", "tun0", "mtu", str(MTU), "txqueuelen", str(WAITING), "up")
    return link


def carry(links, rate, delay):
    """Takes packets from each machine at `rate` bytes a second, and delivers them after `delay` seconds."""
    free = [0.0] * len(links)           # the time at which each machine's link has sent all its packets
    waiting, number = [], 0             # entries of `waiting`: (time of arrival, number, link, packet)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            try:
                os.write(links[to], packet)
            except OSError:
                pass                    # a full queue drops the packet, as networks do
        ready = [k for k in range(len(links)) if (free[k] - now) * rate < QUEUE]
        until = min([waiting[0][0]] if waiting else [now + 1])
        if len(ready) < len(links):
            until = min(until, now + 1e-3)
        readable, _, _ = select.select([links[k] for k in ready], [], [], max(0.0, until - time.monotonic()))
        for k in ready:
            if links[k] not in readable:
                continue
            try:
                packet = os.read(links[k], 1 << 16)
            except BlockingIOError:
                continue
            to = packet[19] - 1         # IPv4: the last byte of the destination
            if packet[0] >> 4 != 4 or not 0 <= to < len(links):
                continue
            free[k] = max(free[k], time.monotonic()) + len(packet) / rate
            heapq.heappush(waiting, (free[k] + delay, number, to, packet))
            number += 1


def start_network(machines, rate, delay):
    """Starts the process that carries packets. SIGTERM ends the process."""
    for k in range(machines):
        call("ip", "netns", "add", name(k))
    links = [open_link(k) for k in range(machines)]
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # carries packets before all other work, so that a busy CPU does not delay the network
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        carry(links, rate, delay)
    for link in links:
        os.close(link)
    return child


AGENT = """#!/bin/sh
# What mpirun calls in place of ssh: HOST COMMAND...
host=$1; shift
exec ip netns exec {prefix}-$(( ${{host##*.}} - 1 )) unshare --uts sh -c "hostname machine${{host##*.}}; $*"
"""


def results(text):
    rows = {}
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["name"][:4] if row["name"].startswith("hash") else row["name"]] = row
    return rows


def run(command, env):
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    rows = results(out.stdout)
    if out.returncode != 0 or "hash" not in rows:
        sys.exit(f"{' '.join(command)}: status {out.returncode}\n{out.stdout}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2, help="how many (2)")
    parser.add_argument("--mbit", type=int, default=100, help="million bits a second of a link (100)")
    parser.add_argument("--delay", type=int, default=1000, help="microseconds from machine to machine (1000)")
    parser.add_argument("--program", default="build/mpi/machines", help="(build/mpi/machines)")
    parser.add_argument("options", nargs="*", help="behind --: those of the program")
    args = parser.parse_args()
    missing = [what for what, there in (("root", os.getuid() == 0), ("ip", shutil.which("ip")),
                                        ("/dev/net/tun", os.path.exists("/dev/net/tun")),
                                        ("mpirun", shutil.which("mpirun")),
                                        (args.program, os.access(args.program, os.X_OK))) if not there]
    if missing:
        sys.exit(f"machines.py needs {', '.join(missing)}: see its first lines")
    if not 2 <= args.machines <= 64:
        sys.exit(f"--machines {args.machines}: 2 to 64")
    if args.mbit < 1 or args.delay < 1:
        sys.exit(f"--mbit {args.mbit} --delay {args.delay}: at least 1 of both")
    # raises SystemExit, so that `finally` removes the network
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    print(f"{args.machines} machines, {args.mbit} Mbit/s, {args.delay} us from each to each")
    print(f"{'':40} {'step':>8} {'forecast':>8} {'ratio':>6} {'network':>8} {'sent / least':>12}  bits")
    carrier, wrong = None, 0
    with tempfile.TemporaryDirectory() as folder:
        agent = os.path.join(folder, "agent")
        with open(agent, "w") as f:
            f.write(AGENT.format(prefix=name(0)[:-2]))
        os.chmod(agent, 0o755)
        try:
            carrier = start_network(args.machines, args.mbit * 1e6 / 8, args.delay * 1e-6)
            hosts = ",".join(f"{NETWORK}.{k + 1}" for k in range(args.machines))
            mpirun = ["ip", "netns", "exec", name(0), "mpirun", "-n", str(args.machines), "--host", hosts,
                      "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self",
                      "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24",
                      "--mca", "oob_tcp_if_include", f"{NETWORK}.0/24", "--bind-to", "none"]
            for way in [args.options] if args.options else WAYS:
                own = [args.program, "--json", "--threads", "1", *way]
                net = ["--mbit", str(args.mbit), "--delay", str(args.delay)]
                got = run([*mpirun, *own, *net], env)
                alone = run([*own, "--ranks", str(args.machines)], env)
                same = got["hash"]["name"] == alone["hash"]["name"]
                step, sent = got["a step, beside the forecast"], got["sent by a process, beside the least"]
                network = got["forecast: what it waits for the network"]["value"]
                wrong += not same
                print(f"{' '.join(way):40} {step['value']:7.2f}s {step['peer']:7.2f}s "
                      f"{step['ratio']:6.2f} {network:7.2f}s {sent['ratio']:12.3f}  "
                      f"{'the same' if same else 'OTHERS'}", flush=True)
        finally:
            if carrier:
                os.kill(carrier, signal.SIGTERM)
                os.waitpid(carrier, 0)
            for k in range(args.machines):
                pids = subprocess.run(["ip", "netns", "pids", name(k)], capture_output=True, text=True).stdout
                for pid in map(int, pids.split()):  # ends processes that a stopped mpirun has left there
                    os.kill(pid, signal.SIGKILL)
                subprocess.run(["ip", "netns", "del", name(k)], stderr=subprocess.DEVNULL)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
