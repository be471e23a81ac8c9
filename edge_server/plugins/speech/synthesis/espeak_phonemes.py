"""Phonemes of a text, in the International Phonetic Alphabet, from the library of the program espeak-ng.

The library is not part of this package and none of its requirements: it is used where the machine has it. Its licence
is GPL 3 or later. It keeps its state in static variables, and reads hostile texts, so it is loaded only in a model's
child process, where one thread calls it.

The interface is that of `speak_lib.h`, checked against 1.51. `espeak_TextToPhonemes` translates one clause and advances
a pointer. It tells neither the mark that ended the clause nor whether a sentence ended, so both are read from the text
that it has passed over.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence

from edge_server.errors import BackendMissing, LoadError

_LIBRARY = "libespeak-ng.so.1"
_INSTALL = "install espeak-ng, on Debian, Ubuntu and JetPack with: apt install libespeak-ng1"

_OUTPUT_RETRIEVAL = 1
_DONT_EXIT = 0x8000
"""Return an error where the library would otherwise end the process."""
_UTF8 = 1
_IPA = 0x02
_TIE = 0x80

TIE = "^"
"""Stands between the letters of one sound, such as a^ɪ, if ties are asked for."""

_MARKS = {
    **dict.fromkeys(".。．｡।", "."), **dict.fromkeys("!！", "!"), **dict.fromkeys("?？؟", "?"),
    **dict.fromkeys(",，、،…", ","), **dict.fromkeys(":：", ":"), **dict.fromkeys(";；؛", ";"),
}  # fmt: skip
"""Punctuation of a text -> the mark that voices were trained with."""

_SENTENCE_ENDS = (".", "!", "?")

_CLAUSE_END = re.compile(rf"\.\.+|[{''.join(_MARKS)}]|\n\s*\n")
_LAST_CHARACTERS = re.compile(r"\w?\W*")
"""Of a clause, read backwards: what is no part of its last word. The library has passed over one character of the next
clause."""


class Phonemizer:
    """The library with one language at a time. Only one may exist in a process."""

    def __init__(self, *, has_ties: bool = False) -> None:
        """`has_ties`: put TIE between the letters of one sound. Raises BackendMissing, LoadError."""
        try:
            self._library = library = ctypes.CDLL(_LIBRARY)
            library.espeak_TextToPhonemes.restype = ctypes.c_char_p
            library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]
            library.espeak_SetVoiceByName.argtypes = [ctypes.c_char_p]
        except (OSError, AttributeError) as error:
            failure = BackendMissing(f"{_LIBRARY} does not load ({error}); {_INSTALL}")
        else:
            if library.espeak_Initialize(_OUTPUT_RETRIEVAL, 0, None, _DONT_EXIT) < 0:
                raise BackendMissing(f"{_LIBRARY} finds no data of languages; {_INSTALL}")
            self._mode = _IPA | (_TIE | ord(TIE) << 8 if has_ties else 0)
            self._language = ""
            return
        raise failure

    def set_language(self, language: str) -> None:
        """Translate texts of a language, named as by `espeak-ng --voices`, from now on. Raises LoadError."""
        if language != self._language:
            # Its own function finds files of languages: `fr` is the one of fr-fr.
            names = (language, language.partition("-")[0])
            if all(self._library.espeak_SetVoiceByName(name.encode()) for name in names):
                raise LoadError(f"espeak-ng knows no language '{language[:40]}': espeak-ng --voices lists them")
            self._language = language

    def sentences(self, text: str, max_length: int) -> list[str]:
        """Return the phonemes of each sentence, with the marks between its clauses. Longer ones than `max_length`
        characters are split."""
        # All at once: clauses that are left over would come before the next text.
        found: list[str] = []
        sentence = ""
        for phonemes, mark, is_end in self._clauses(text):
            sentence = f"{sentence} {phonemes}{mark}".strip() if phonemes else sentence
            if is_end and sentence:
                found += split_phonemes(sentence, max_length)
                sentence = ""
        return [*found, *split_phonemes(sentence, max_length)]

    def _clauses(self, text: str) -> Iterator[tuple[str, str, bool]]:
        """Yield the phonemes of each clause, the mark that ended it or "", and whether a sentence ended."""
        data = text.replace("\0", " ").encode()
        buffer = ctypes.create_string_buffer(data)
        begin = ctypes.addressof(buffer)
        pointer = ctypes.c_void_p(begin)
        passed = 0
        while pointer.value is not None:
            phonemes = self._library.espeak_TextToPhonemes(ctypes.byref(pointer), _UTF8, self._mode)
            end = len(data) if pointer.value is None else pointer.value - begin
            clause = data[passed:end].decode("utf-8", "replace")
            passed = end
            found = _LAST_CHARACTERS.match(clause[::-1])
            match = _CLAUSE_END.search(clause, len(clause) - found.end()) if found else None
            text_mark = match[0] if match else ""
            # Several dots are a pause in the sentence.
            mark = "," if text_mark.startswith("..") else _MARKS.get(text_mark, "")
            is_end = mark in _SENTENCE_ENDS or text_mark.startswith("\n")
            yield (phonemes or b"").decode("utf-8", "replace").strip(), mark, is_end


def split_phonemes(sentence: str, max_length: int) -> Sequence[str]:
    """Return the parts of a sentence, each at most `max_length` characters long: split behind a mark, else between
    words, else anywhere. No part for an empty sentence."""
    parts = []
    while len(sentence) > max_length:
        window = sentence[: max_length + 1]
        cut = max(window.rfind(f"{mark} ") + 1 for mark in ",;:")
        cut = cut or window.rfind(" ")
        cut = cut if cut > 0 else max_length
        parts.append(sentence[:cut].strip())
        sentence = sentence[cut:].strip()
    return [part for part in (*parts, sentence) if part]
