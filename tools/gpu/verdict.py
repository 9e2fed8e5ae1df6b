"""What a preflight has found, from the records of all ranks alone: the verdict and the report.

A record is what `measure` of preflight.py returns for one rank:

    rank, node, host, gpu     indices of the rank, its node and its GPU there; the host's name
    device, versions, clocks  names; {"torch": "2.13.0", ...}; the GPU's clocks and temperature
    free                      {"run folder": bytes, "shared memory": bytes}
    exact                     whether matmuls of small integers were right
    figures                   {"matmul bfloat16": (median, worst), ...}: FLOP/s, bytes/s or seconds
    links                     [{"from": rank, "to": rank, "rate": (median, worst)}], bytes/s
"""

from __future__ import annotations

from statistics import median

from common.metrics import peak_flops

DATA_SHEET_SHARE = 0.5  # of the data sheet's matmul rate: below it, something is wrong
NEEDED = {"run folder": 10e9, "shared memory": 1e9}  # free bytes
UNITS = {"matmul": (1e12, "TFLOP/s"), "latency": (1e-6, "us")}  # everything else: GB/s


def show(name: str, value: float) -> str:
    scale, unit = UNITS.get(name.split()[0], (1e9, "GB/s"))
    return f"{value / scale:.3g} {unit}"


def device_name(record: dict) -> str:
    return f"{record['host']} GPU {record['gpu']}"


def is_common(name: str) -> bool:
    """Whether the ranks of a node have this figure in common."""
    return name.endswith(("in a node", "over all nodes"))


def one_per_node(records: list[dict]) -> list[dict]:
    return list({r["node"]: r for r in records[::-1]}.values())[::-1]


def judge(records: list[dict], tolerance: float) -> list[str]:
    """What is missing or far off, one line each. tolerance: 0.1 allows a tenth below the peers.

    A figure is compared with the median of its peers or, between two, with the better one; a GPU's
    matmul rate with its data sheet as well, because one or two GPUs have no median.
    """
    nodes = one_per_node(records)
    found = []
    for name in (n for n in records[0]["figures"] if "over all nodes" not in n):
        peers = nodes if is_common(name) else records
        values = [r["figures"][name][0] for r in peers]
        sign = -1 if name.startswith("latency") else 1  # where less is better
        usual = median(values) if len(values) > 2 else sign * max(sign * v for v in values)
        than = "the median of its peers" if len(values) > 2 else "the other's"
        for record, value in zip(peers, values, strict=True):
            if sign * (usual - value) > tolerance * usual:
                who = record["host"] if is_common(name) else device_name(record)
                found.append(f"{who}: {name} {show(name, value)}, {than}: {show(name, usual)}")
    for r in records:
        if not r["exact"]:
            found.append(f"{device_name(r)}: wrong results in matmuls of small integers")
        peak, value = peak_flops(r["device"]), r["figures"]["matmul bfloat16"][0]
        if peak and value < DATA_SHEET_SHARE * peak:
            rate = f"{show('matmul', value)}, {value / peak:.0%} of the data sheet's"
            found.append(f"{device_name(r)}: matmul bfloat16 {rate} {show('matmul', peak)}")
    for r in nodes:
        short = {name: free for name, free in r["free"].items() if free < NEEDED[name]}
        found += [f"{r['host']}: {free / 1e9:.1f} GB free in the {n}" for n, free in short.items()]
    return found + odd_versions(nodes) + slow_links(records, tolerance)


def odd_versions(nodes: list[dict]) -> list[str]:
    found = []
    software = [r["versions"] | {"device": r["device"]} for r in nodes]
    for name in sorted({name for each in software for name in each}):
        have = [each.get(name) for each in software]
        usual = max(have, key=have.count)
        odd = [f"{r['host']} {x}" for r, x in zip(nodes, have, strict=True) if x != usual]
        if odd:
            found.append(f"{name}: {', '.join(odd)}; the other nodes have {usual}")
    return found


def slow_links(records: list[dict], tolerance: float) -> list[str]:
    """Slow links between nodes, and the network card that they have in common.

    A link is one direction. It is compared with the median of all links and with its own other
    direction. A card is named if both of its links out of the node, or into it, are slow.
    """
    links = {(x["from"], x["to"]): x["rate"][0] for r in records for x in r["links"]}
    names = {r["rank"]: device_name(r) for r in records}
    usual = median(links.values()) if len(links) > 2 else 0.0
    expected = {link: max(usual, links[link[::-1]]) for link in links}
    slow = {link for link, rate in links.items() if rate < (1 - tolerance) * expected[link]}
    found = []
    for end, way in ((0, "sends"), (1, "receives")):
        for rank, name in names.items():
            of_card = [link for link in links if link[end] == rank]
            if len(of_card) > 1 and slow.issuperset(of_card):
                rates = " and ".join(show("link", links[link]) for link in of_card)
                found.append(
                    f"{name}: its network card {way} slowly: {rates}, "
                    f"the median of all links: {show('link', usual)}"
                )
                slow -= set(of_card)
    for link in sorted(slow):
        source, target = (names[rank] for rank in link)
        rate, better = show("link", links[link]), show("link", expected[link])
        found.append(f"{source} to {target}: {rate}, expected: {better}")
    return found


def report(records: list[dict], findings: list[str]) -> str:
    """A row per node: the median of its slowest GPU and, in brackets, the worst repeat."""
    nodes, names = one_per_node(records), list(records[0]["figures"])
    columns = [name for name in names if not name.endswith("over all nodes")]
    head = ["node", "GPUs", "clocks", "free", *columns, "links in"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for node in nodes:
        ranks = [r for r in records if r["node"] == node["node"]]
        free = ", ".join(f"{name} {size / 1e9:.0f} GB" for name, size in node["free"].items())
        cells = [node["host"], f"{len(ranks)} x {node['device']}", node["clocks"] or "-", free]
        for name in columns:
            slowest = max if name.startswith("latency") else min
            typical, worst = slowest(r["figures"][name] for r in ranks)
            cells.append(f"{show(name, typical)} ({show(name, worst)})")
        rates = [x["rate"][0] for r in ranks for x in r["links"]]
        cells.append(show("link", min(rates)) if rates else "-")
        lines.append(f"| {' | '.join(cells)} |")
    everywhere = [name for name in names if name not in columns]
    lines += [f"{name}: {show(name, records[0]['figures'][name][0])}" for name in everywhere]
    lines += [f"  ! {line}" for line in findings] or ["nothing is missing, nothing is far off"]
    return "\n".join(lines)
