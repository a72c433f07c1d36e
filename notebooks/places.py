"""Finds a place in a script by its code alone: a better comment, or one that wraps elsewhere, moves nothing."""

import io
import tokenize


def code_of(text):
    """The code of a script, without comments and empty lines, and for each of its characters its place in the text."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            comments[line] = column
    code, places, start = "", [], 0
    for number, line in enumerate(text.split("\n"), 1):
        kept = line[: comments.get(number)].rstrip()
        if kept:
            code += kept + "\n"
            places += [*range(start, start + len(kept)), start + len(line)]  # the last one is the line's end
        start += len(line) + 1
    return code, places


def place(text, wanted, name, after=0):
    """Where the code `wanted` stands in the text: from here, and to there. Comments between its lines are a part of the
    place, and one behind its last line is if `wanted` ends with a line break."""
    code, places = code_of(text)
    at = next((at for at, where in enumerate(places) if where >= after), len(code))
    if not after and code.count(wanted) != 1:
        raise ValueError(f"this occurs {code.count(wanted)} times in {name} and should occur once:\n{wanted}")
    at = code.find(wanted, at)
    if at < 0:
        raise ValueError(f"this does not occur in {name} after the place before it:\n{wanted}")
    return places[at], places[at + len(wanted) - 1] + 1


def replaced(text, old, new, name):
    """The text with other code in place of `old`, which occurs once."""
    start, end = place(text, old, name)
    return text[:start] + new + text[end:]
