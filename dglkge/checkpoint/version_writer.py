"""Writes one version from its first file to publication. No collectives: runs in a thread beside training."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dglkge.checkpoint import hdf5_format, layout, part_files
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage, VersionStore, check_files, file_crc32, is_whole
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError, JobError
from dglkge.formats.bigraph_files import bigraph_attributes, bigraph_config, write_stats
from dglkge.typing import RELATION, TablePart

WRITTEN_IN_PLACE = (layout.CONFIG_FILE, layout.VERSION_FILE)
"""Texts that PyTorch-BigGraph writes when it resumes from a version: they are no links to another's."""

Contents = dict[str, str | Callable[[Path], object]]
"""Texts by file name, or functions that write them to a path."""


@dataclass(frozen=True)
class NewVersion:
    """Share of one process in a version; on rank 0 the files of the others are awaited, then published.

    Files alone carry the protocol, so that training can use the network meanwhile: each writer leaves a
    receipt for each file in the run's store, and rank 0 polls for all receipts there.

    Fields that are not described are those of :class:`dglkge.checkpoint.manager.CheckpointManager`.

    Attributes
    ----------
    storage : CheckpointStorage
        The checkpoint's folder, in which files are written.
    store : VersionStore
        Where they count: the folder itself, or what it is a cache of.
    limit_seconds : float
        Rank 0 fails if the files of the other writers have not changed for so long.
    draft : Manifest
        Its manifest, which lacks the files still.
    parts : sequence of TablePart
        What this process writes: entity rows, and all relations on rank 0, which also publishes.
    previous : Manifest
        Of the version before; before the first one an empty one.
    stats : sequence of mapping
        Records of training since the version before.
    """

    storage: CheckpointStorage
    store: VersionStore
    names: Mapping[str, Vocabulary]
    limit_seconds: float
    draft: Manifest
    num_parts: int
    parts: Sequence[TablePart]
    previous: Manifest
    stats: Sequence[Mapping[str, Any]]
    state: bytes

    @property
    def _folder(self) -> LeasedFolder:
        return self.storage.folder(self.draft.version)

    @property
    def _older(self) -> Path:
        """Folder of the version before; it does not exist if there is none."""
        return self.storage.folder(self.previous.version).path

    def progress(self) -> str:
        """Return a text that changes while this process's share is written or uploaded."""
        return json.dumps([self._changes(), self.store.progress])

    def _changes(self) -> list[tuple[str, int]]:
        """Return the files of the version, also unfinished ones, and the times of their changes."""
        changes = []
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile: a change too
            for path in sorted(self._folder.path.iterdir()):
                changes.append((path.name, path.stat().st_mtime_ns))
        return changes

    def write(self) -> None:
        """Write this process's files of the version and, where it has the relations, publish it.

        If it fails, the version before stays as it is. CheckpointError if a file may not be written; JobError
        if the disk fails, another machine's files do not come, or the store cannot be reached.
        """
        folder, version, meta = self._folder, self.draft.version, self.draft.meta
        config = bigraph_config(meta, self.num_parts, str(folder.path.resolve()))
        attributes, allowance = bigraph_attributes(meta, config), 0.0
        folder.make()
        for part in self.parts:
            entry = part_files.write_table(folder, version, part, meta, attributes)
            if part.table != RELATION:
                entry = replace(entry, texts=self._names(part, entry))
            # The receipt follows the durable file: its presence is the proof that rank 0 waits for.
            allowance = max(allowance, self.store.add_part(version, entry))
        if any(part.table == RELATION for part in self.parts):
            files = self._wait_for_parts(self.limit_seconds + allowance)
            self.store.publish_version(self._complete(files, config), files)

    def _names(self, part: TablePart, entry: FileEntry) -> tuple[TextEntry, ...]:
        """Write a part's names and count, or link them if the version before has the same."""
        # Equal checksums of the ids mean the same rows in the same part, so the names are equal too.
        key = (entry.table, entry.part, entry.ids_crc32)
        same = [old for old in self.previous.files if (old.table, old.part, old.ids_crc32) == key]
        contents = _name_lists(part.table, part.part, part.original_ids, self.names.get(part.table))
        return self._write_texts(contents, [text for old in same for text in old.texts])

    def _write_texts(self, contents: Contents, known: Iterable[TextEntry]) -> tuple[TextEntry, ...]:
        """Write texts; those that are known from the version before are linked."""
        # A text that is there with its size is the same: its content does not change, and is not read.
        old = {text.name: text for text in known if is_whole(self._older, text, checksums=False)}
        for name, content in contents.items():
            if name in old:
                self._folder.link_or_copy(self._older / name, name)
            else:
                old[name] = _write_text(self._folder, name, content)
        return tuple(old[name] for name in contents)

    def _wait_for_parts(self, limit_seconds: float) -> list[FileEntry]:
        """Wait for the receipts of all parts in the store; return their entries."""
        version, meta = self.draft.version, self.draft.meta
        parts = itertools.product(meta.entity_types, range(self.num_parts))
        names = [*(layout.embeddings_file(*part, version) for part in parts), layout.model_file(version)]
        entries: dict[str, FileEntry] = {}
        signs: object = None
        last_news = time.monotonic()
        while missing := [name for name in names if name not in entries]:
            entries |= self.store.read_receipts(version, missing)
            news, waited = (len(entries), self._changes()), time.monotonic() - last_news
            if news != signs:
                signs, last_news = news, time.monotonic()
            elif waited > limit_seconds:
                # The failure of another machine: a restart of the job may succeed.
                file = layout.receipt_file(missing[0])
                raise JobError(f"{file} is missing: no part has come to {self.store.url} for {waited:.0f} s")
            if len(entries) < len(names):
                time.sleep(self.store.poll_seconds)
        for table, count in {**meta.entity_types, RELATION: len(meta.relations)}.items():
            rows = sum(entry.num_rows for entry in entries.values() if entry.table == table)
            if rows != count:
                raise JobError(f"table {table!r}: {rows} rows were written, expected {count}")
        return [entries[name] for name in names]

    def _complete(self, files: Sequence[FileEntry], config: Mapping[str, Any]) -> Manifest:
        """Write the texts, the state and the manifest of a version whose parts are complete."""
        folder, draft = self._folder, self.draft
        # config.json and the version differ between versions; the others are of one data set.
        same = [text for text in self.previous.texts if text.name not in WRITTEN_IN_PLACE]
        contents = _run_texts(draft.version, draft.meta, json.dumps(config, indent=4), self.names)
        texts = self._write_texts(contents, same)
        write_stats(folder, self._older, self.stats)
        state = None
        if self.state:
            state = _write_text(folder, layout.STATE_FILE, lambda path: path.write_bytes(self.state))
        manifest = replace(draft, files=files, texts=texts, state=state)
        # The order from here on is the commit protocol. The manifest takes the place of the receipts. It
        # lists files that are all durable, and nothing in the folder changes any more.
        for path in folder.path.glob("*" + layout.RECEIPT_SUFFIX):
            path.unlink(missing_ok=True)
        content = manifest.to_json()
        folder.write_text(layout.MANIFEST_FILE, content)
        return replace(manifest, content=content.encode())


def write_anew(storage: CheckpointStorage, manifest: Manifest, names: Mapping[str, Vocabulary]) -> list[str]:
    """Write the damaged and the missing text files of a version with whole rows again; return their names.

    Damaged files are moved to a folder of damaged files. CheckpointError if a text differs from the lost one.
    """
    folder = storage.folder(manifest.version)
    damaged = {name for name, text in manifest.all_texts.items() if not is_whole(folder.path, text)}
    if not damaged:
        return []
    aside = storage.damaged_folder(manifest.version)
    for name in damaged:
        if (folder.path / name).exists():
            (folder.path / name).replace(aside / name)
    contents: Contents = {}
    for entry in manifest.files:
        path = folder.path / entry.name
        # The HDF5 files have a copy of config.json as an attribute, and their checksums were verified before.
        with hdf5_format.open_file(path) as file:
            if entry.table == RELATION:
                config = str(file.attrs["config/json"])
                contents |= _run_texts(manifest.version, manifest.meta, config, names)
            else:
                ids = torch.from_numpy(hdf5_format.original_ids(path, file, manifest.first_id(entry)))
                contents |= _name_lists(entry.table, entry.part, ids, names.get(entry.table))
    for name in damaged:
        if name not in contents:
            raise CheckpointError(f"{folder.path / name} cannot be written anew: the names are not at hand")
        _write_text(folder, name, contents[name])
    # The same names and rows must give the same bytes. Another result means that the names are not those of
    # the run.
    check_files(folder.path, manifest.all_texts.values())
    return sorted(damaged)


def _name_lists(table: str, part: int, ids: torch.Tensor, names: Vocabulary | None) -> Contents:
    """Return PyTorch-BigGraph's list of a part's names, by ascending ids, and its count.

    Without names the ids stand in.
    """

    def write(path: Path) -> None:
        # Streamed by hand: json.dumps of a list would build the whole text of millions of names in memory.
        with open(path, "w", encoding="utf-8") as file:
            for index, id_ in enumerate(ids.sort().values.tolist()):
                name = str(id_) if names is None else names[id_]
                file.write((",\n    " if index else "[\n    ") + json.dumps(name))
            file.write("\n]" if len(ids) else "[]")

    return {
        layout.entity_names_file(table, part): write,
        layout.entity_count_file(table, part): f"{len(ids)}\n",
    }


def _run_texts(version: int, meta: CheckpointMeta, config: str, names: Mapping[str, Vocabulary]) -> Contents:
    """Return the texts that belong to no part."""
    labels = list(RelationVocabulary(meta.relations).labels.names)
    saves = {layout.vocabulary_file(name): names[name].save for name in meta.entity_types if name in names}
    return {
        layout.CONFIG_FILE: config,
        layout.VERSION_FILE: f"{version}\n",
        layout.RELATION_COUNT_FILE: f"{len(labels)}\n",
        layout.RELATION_NAMES_FILE: json.dumps(labels, indent=4),
        **saves,
    }


def _write_text(folder: LeasedFolder, name: str, content: str | Callable[[Path], object]) -> TextEntry:
    """Write one of the texts; return its entry."""
    with folder.new_file(name) as path:
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content(path)
    path = folder.path / name
    return TextEntry(name, path.stat().st_size, file_crc32(path))
