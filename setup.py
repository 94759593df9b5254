"""The packaging stands in pyproject.toml; this file is for tools that ask for one."""

from setuptools import setup

setup()
