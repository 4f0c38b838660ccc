"""Writes maps8.txt: the numbers of bitsandbytes' dynamic maps, first the signed and then the unsigned map, one
a line. Needs bitsandbytes 0.50 and torch."""
import pathlib

from bitsandbytes.functional import create_dynamic_map

numbers = [x for signed in (True, False) for x in create_dynamic_map(signed).tolist()]
text = "".join(f"{x:.9g}\n" for x in numbers)
(pathlib.Path(__file__).parent / "maps8.txt").write_text(text)
