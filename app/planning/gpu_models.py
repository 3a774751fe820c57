"""GPUs that a plan can be made for without one at hand, by the names that vendors, drivers and people use.

Sources: NVIDIA's data sheets of data-centre and workstation cards, where figures "with sparsity" are
halved, and its architecture papers (TU102, GA102, AD102, RTX Blackwell) for the others. Memory is what the
driver reports as total where a card was seen, else the data sheet's with 1.5 % off. Peaks are of 16-bit
products with float32 sums: on GeForce cards twice the float32 rate at the boost clock, on workstation cards
four times. Of laptops: at the highest power that is sold. Links are all lanes of PCIe in one direction: 64
GB/s for generation 5, 32 for 4, 16 for 3, half of it for cards with eight lanes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moebius.errors import UserError


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU; filled by the table below, or from options."""

    name: str
    memory_bytes: int
    # Bytes per second of its own memory, and of the link to the host in one direction.
    bandwidth: float
    link: float
    flops: float  # Operations per second, a multiplication and an addition being two.
    # The unequal GPUs of a host, in their order, that it stands for with the least of each figure.
    kinds: tuple[GpuModel, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """Returns whether it stands for GPUs of several names."""
        return len({kind.name for kind in self.kinds}) > 1


# Name | other names, each as people write it | MiB | GB/s | TFLOP/s | link, GB/s.
_TABLE = """
B300               | b300 sxm, gb300                                      | 275040 | 8000 | 2250  | 64
B200               | b200 sxm, gb200, hgx b200                            | 183359 | 8000 | 2250  | 64
H200               | h200 sxm, h200 141gb, gh200 144gb                    | 143771 | 4800 | 989   | 64
H200 NVL           |                                                      | 143771 | 4800 | 835   | 64
H100               | h100 sxm, h100 sxm5, h100 80gb, h100 80gb hbm3, h800 | 81559  | 3350 | 989   | 64
H100 PCIe          |                                                      | 81559  | 2039 | 756   | 64
H100 NVL           | h100 94gb                                            | 95830  | 3938 | 835   | 64
H20                | h20 96gb                                             | 97871  | 4000 | 148   | 64
GH200              | gh200 96gb, gh200 480gb                              | 97871  | 4000 | 989   | 450
A100 80GB          | a100, a100 sxm4 80gb, a100 80gb sxm, a800            | 81920  | 2039 | 312   | 32
A100 80GB PCIe     | a100 pcie 80gb, a800 pcie                            | 81920  | 1935 | 312   | 32
A100 40GB          | a100 sxm4 40gb, a100 pcie 40gb                       | 40960  | 1555 | 312   | 32
A30                | a30 24gb                                             | 24576  | 933  | 165   | 32
A40                | a40 48gb                                             | 46068  | 696  | 149.7 | 32
A10                | a10g, a10 24gb                                       | 23028  | 600  | 125   | 32
A2                 |                                                      | 15356  | 200  | 18    | 16
L40S               |                                                      | 46068  | 864  | 362   | 32
L40                |                                                      | 46068  | 864  | 181   | 32
L4                 |                                                      | 23034  | 300  | 121   | 32
T4                 |                                                      | 15360  | 320  | 65    | 16
RTX PRO 6000       | rtx pro 6000 blackwell, pro 6000                     | 97887  | 1792 | 503.8 | 64
RTX PRO 6000 Max-Q | rtx pro 6000 blackwell max-q, pro 6000 max-q         | 97887  | 1792 | 438.9 | 64
RTX PRO 5000       | rtx pro 5000 blackwell, rtx pro 5000 48gb            | 48935  | 1344 | 294   | 64
RTX PRO 4500       | rtx pro 4500 blackwell                               | 32623  | 896  | 219   | 64
RTX PRO 4000       | rtx pro 4000 blackwell                               | 24467  | 672  | 187   | 64
RTX 6000 Ada       |                                                      | 49140  | 960  | 364.2 | 32
RTX 5000 Ada       |                                                      | 32760  | 576  | 261   | 32
RTX 4500 Ada       |                                                      | 24570  | 432  | 158.5 | 32
RTX 4000 Ada       |                                                      | 20475  | 360  | 106.9 | 32
RTX A6000          |                                                      | 49140  | 768  | 154.8 | 32
RTX A5500          |                                                      | 24564  | 768  | 136.4 | 32
RTX A5000          |                                                      | 24564  | 768  | 111.1 | 32
RTX A4500          |                                                      | 20470  | 640  | 94.6  | 32
RTX A4000          |                                                      | 16376  | 448  | 76.7  | 32
Quadro RTX 8000    |                                                      | 49152  | 672  | 130.5 | 16
Quadro RTX 6000    |                                                      | 24576  | 672  | 130.5 | 16
RTX 5090           |                                                      | 32607  | 1792 | 209.5 | 64
RTX 5090 Laptop    |                                                      | 24463  | 896  | 63    | 64
RTX 5080           |                                                      | 16303  | 960  | 112.6 | 64
RTX 5080 Laptop    |                                                      | 16303  | 896  | 49    | 64
RTX 5070 Ti        |                                                      | 16303  | 896  | 87.9  | 64
RTX 5070 Ti Laptop |                                                      | 12227  | 672  | 37    | 64
RTX 5070           |                                                      | 12227  | 672  | 61.7  | 64
RTX 5070 Laptop    |                                                      | 8151   | 384  | 29    | 32
RTX 5060 Ti        | 5060 ti 16gb                                         | 16311  | 448  | 47.4  | 32
RTX 5060 Ti 8GB    |                                                      | 8151   | 448  | 47.4  | 32
RTX 5060           |                                                      | 8151   | 448  | 38.4  | 32
RTX 4090           |                                                      | 24564  | 1008 | 165.2 | 32
RTX 4090 D         |                                                      | 24564  | 1008 | 147   | 32
RTX 4090 Laptop    |                                                      | 16376  | 576  | 66    | 32
RTX 4080 Super     |                                                      | 16376  | 736  | 104.4 | 32
RTX 4080           |                                                      | 16376  | 717  | 97.5  | 32
RTX 4080 Laptop    |                                                      | 12282  | 432  | 49    | 32
RTX 4070 Ti Super  |                                                      | 16376  | 672  | 88.2  | 32
RTX 4070 Ti        |                                                      | 12282  | 504  | 80.2  | 32
RTX 4070 Super     |                                                      | 12282  | 504  | 71    | 32
RTX 4070           |                                                      | 12282  | 504  | 58.3  | 32
RTX 4070 Laptop    |                                                      | 8188   | 256  | 31    | 16
RTX 4060 Ti        | 4060 ti 8gb                                          | 8188   | 288  | 44.1  | 16
RTX 4060 Ti 16GB   |                                                      | 16380  | 288  | 44.1  | 16
RTX 4060           |                                                      | 8188   | 272  | 30.2  | 16
RTX 4060 Laptop    |                                                      | 8188   | 256  | 23    | 16
RTX 3090 Ti        |                                                      | 24564  | 1008 | 80    | 32
RTX 3090           |                                                      | 24576  | 936  | 71    | 32
RTX 3080 Ti        |                                                      | 12288  | 912  | 68.2  | 32
RTX 3080 Ti Laptop |                                                      | 16384  | 512  | 47    | 32
RTX 3080           | 3080 10gb                                            | 10240  | 760  | 59.5  | 32
RTX 3080 12GB      |                                                      | 12288  | 912  | 61.3  | 32
RTX 3080 Laptop    | 3080 laptop 16gb                                     | 16384  | 448  | 42    | 32
RTX 3070 Ti        |                                                      | 8192   | 608  | 43.5  | 32
RTX 3070           |                                                      | 8192   | 448  | 40.6  | 32
RTX 3060 Ti        |                                                      | 8192   | 448  | 32.4  | 32
RTX 3060           | 3060 12gb                                            | 12288  | 360  | 25.5  | 32
Titan RTX          |                                                      | 24576  | 672  | 130.5 | 16
RTX 2080 Ti        |                                                      | 11264  | 616  | 53.8  | 16
RTX 2080 Super     |                                                      | 8192   | 496  | 44.6  | 16
RTX 2080           |                                                      | 8192   | 448  | 40.3  | 16
RTX 2070           |                                                      | 8192   | 448  | 29.9  | 16
"""
# Words of names that tell no two cards apart.
_IGNORED = frozenset(
    ("nvidia", "geforce", "quadro", "tesla", "rtx", "gpu", "generation", "workstation", "server", "edition")
)
_WORD = re.compile(
    r"laptop|mobile|super|titan|nvidia|geforce|quadro|tesla|rtx|ada|pro|ti|[a-z]+|\d+", re.IGNORECASE
)
# More GPUs than a host has; a larger number means a model that is not in the table.
_MOST_GPUS = 64
_SUGGESTIONS = 4


def _key(name: str) -> str:
    """Returns the words that tell cards apart, in one order; those of "RTX-3080Ti" are those of "3080 ti"."""
    words = (word.lower().replace("mobile", "laptop") for word in _WORD.findall(name))
    return " ".join(sorted(word for word in words if word not in _IGNORED))


def _read_table() -> Mapping[str, GpuModel]:
    found: dict[str, GpuModel] = {}
    for line in _TABLE.strip().splitlines():
        name, others, mib, gigabytes, teraflops, link = (cell.strip() for cell in line.split("|"))
        model = GpuModel(
            name,
            int(mib) * 2**20,
            float(gigabytes) * 1e9,
            float(link) * 1e9,
            float(teraflops) * 1e12,
        )
        for other in (name, *filter(None, (text.strip() for text in others.split(",")))):
            found[_key(other)] = model
    return found


_BY_KEY = _read_table()
GPU_MODELS: Mapping[str, GpuModel] = {model.name: model for model in _BY_KEY.values()}


def find_gpu_model(name: str) -> GpuModel | None:
    """Returns the model that a name such as "NVIDIA GeForce RTX 4090" or "h200" means; None: not in the
    table.
    """
    return _BY_KEY.get(_key(name))


def parse_gpus(text: str) -> tuple[int, GpuModel | None]:
    """Returns number and kind of `h200`, `2xh200`, `4090+3090`, `4` or `none`; None where there is only a
    number.

    GPUs of several kinds are one that stands for them, as `least_of` has it. Raises UserError naming what is
    not known, and the names that are nearest.
    """
    plain = text.strip()
    if plain.lower() == "none":
        return 0, None
    if plain.isdecimal() and find_gpu_model(plain) is None and int(plain) <= _MOST_GPUS:
        return int(plain), None
    count, models = 0, list[GpuModel]()
    for part in plain.split("+"):
        number, name = _counted(part)
        model = find_gpu_model(name)
        if model is None or not 0 < count + number <= _MOST_GPUS:
            raise UserError(_refusal(text, name))
        count += number
        models += [model] * number
    return count, least_of(models)


def _counted(part: str) -> tuple[int, str]:
    """Splits "2x4090" into 2 and "4090", "4090" into 1 and "4090"."""
    if matched := re.fullmatch(r"\s*(\d+)\s*[x*×]\s*(.+)", part, re.IGNORECASE):
        return int(matched[1]), matched[2]
    return 1, part


def least_of(gpus: Sequence[GpuModel]) -> GpuModel:
    """Returns what all of them are, or one with the least of each figure."""
    if len(set(gpus)) == 1:
        return gpus[0]
    return GpuModel(
        " + ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        min(gpu.memory_bytes for gpu in gpus),
        min(gpu.bandwidth for gpu in gpus),
        min(gpu.link for gpu in gpus),
        min(gpu.flops for gpu in gpus),
        tuple(gpus),
    )


def _refusal(text: str, name: str) -> str:
    near = difflib.get_close_matches(_key(name), _BY_KEY, _SUGGESTIONS, cutoff=0.5)
    nearest = ", ".join(dict.fromkeys(_BY_KEY[key].name for key in near))
    known = f"nearest: {nearest}" if nearest else f"such as {', '.join(list(GPU_MODELS)[:_SUGGESTIONS])}"
    return (
        f"--gpus: {text!r} is not allowed; allowed: auto, none, a number, NAME, NUMBERxNAME, or several "
        f"joined by +, with NAME a known GPU ({known}; docs/plan.md has all); others: a number and "
        "--gpu-memory, --gpu-bandwidth, --gpu-tflops"
    )
