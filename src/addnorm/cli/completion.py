"""The verb `completion`: a script that completes verbs, tasks, options and choices in a shell.

The scripts are generated from the parser of the command line. A place in a command line is the
verb, for `train` with its task; each place has options, words, and the choices of its options.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

INSTALL = {
    "bash": "addnorm completion bash > ~/.local/share/bash-completion/completions/addnorm",
    "zsh": 'addnorm completion zsh > "${fpath[1]}/_addnorm"',
    "fish": "addnorm completion fish > ~/.config/fish/completions/addnorm.fish",
}
"""For each shell, the command that installs its script."""


@dataclass(frozen=True)
class CommandPlace:
    """What can follow in a command line after a verb, or after `train` and a task.

    Parameters
    ----------
    path : the verb and the task; empty at the start.
    words : verbs, tasks or choices, each with its help.
    options : names of options, each with its help.
    choices : for an option that has choices, these.
    """

    path: tuple[str, ...]
    words: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The path as one word of a shell."""
        return "/".join(self.path)


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(INSTALL), help="the shell: bash, zsh or fish")


def completion(args: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    from addnorm.cli.main import make_parser

    places = list(iter_places(make_parser()))
    body = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[args.shell](places)
    note = f"# Completion of addnorm for {args.shell}. Install: {INSTALL[args.shell]}"
    first, _, rest = body.partition("\n")
    print(f"{first}\n{note}\n{rest}" if first.startswith("#compdef") else f"{note}\n{body}", end="")


def iter_places(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[CommandPlace]:
    """Yield the place of a parser, and those of its subparsers."""
    words: dict[str, str] = {}
    options: dict[str, str] = {}
    choices: dict[str, Sequence[str]] = {}
    below: Mapping[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            words |= {each.dest: each.help or "" for each in action._choices_actions}
        elif not action.option_strings:
            words |= dict.fromkeys(map(str, action.choices or ()), action.help or "")
        for flag in action.option_strings:
            options[flag] = action.help or ""
            if action.choices:
                choices[flag] = [str(choice) for choice in action.choices]
    yield CommandPlace(path, words, options, choices)
    for name, each in below.items():
        yield from iter_places(each, (*path, name))


def _word_steps(places: Sequence[CommandPlace]) -> Iterator[tuple[str, str]]:
    """Yield `path/word` and the path that follows, for every word that makes the path longer."""
    for place in places:
        if place.path:
            yield f"{'/'.join(place.path[:-1])}/{place.path[-1]}", place.name


def bash_script(places: Sequence[CommandPlace]) -> str:
    """Return the completion function of bash. Where nothing matches, bash completes file names."""
    steps = "\n".join(
        f"            {before}) path={after} ;;" for before, after in _word_steps(places)
    )
    cases, values = [], []
    for place in places:
        words, options = " ".join(place.words), " ".join(place.options)
        name = shlex.quote(place.name)
        cases.append(f'        {name}) words="{words}"; options="{options}" ;;')
        for flag, choices in place.choices.items():
            values.append(f'        {name}:{flag}) words="{" ".join(choices)}"; options= ;;')
    return f"""_addnorm() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local path= word= words= options=
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path/$word" in
{steps}
        esac
    done
    case "$path" in
{chr(10).join(cases)}
    esac
    case "$path:$previous" in
{chr(10).join(values) or "        *) ;;"}
    esac
    if [[ "$current" == -* ]]; then words="$options"; fi
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _addnorm addnorm
"""


def zsh_script(places: Sequence[CommandPlace]) -> str:
    """Return the completion function of zsh, with the help of every word."""
    steps = "\n".join(f"      {before}) place={after} ;;" for before, after in _word_steps(places))
    cases, values = [], []
    for place in places:
        name = shlex.quote(place.name)
        words, options = (
            " ".join(shlex.quote(f"{key}:{_one_line(text)}") for key, text in table.items())
            for table in (place.words, place.options)
        )
        cases.append(f"    {name}) names=({words}); flags=({options}) ;;")
        for flag, choices in place.choices.items():
            values.append(f"    {name}:{flag}) names=({' '.join(choices)}); flags=() ;;")
    return f"""#compdef addnorm
_addnorm() {{
  local place= word=
  local -a names flags
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "$place/$word" in
{steps}
    esac
  done
  case "$place" in
{chr(10).join(cases)}
  esac
  case "$place:${{words[CURRENT-1]}}" in
{chr(10).join(values) or "    *) ;;"}
  esac
  if [[ "$PREFIX" == -* ]]; then
    _describe -o 'option' flags
  elif (( $#names )); then
    _describe 'word' names || _files
  else
    _files
  fi
}}
if [[ "${{funcstack[1]}}" == _addnorm ]]; then
  _addnorm "$@"
else
  compdef _addnorm addnorm
fi
"""


def fish_script(places: Sequence[CommandPlace]) -> str:
    """Return the completions of fish, one command for each word, with its help."""
    steps = "\n".join(
        f"            case {before}\n                set place {after}"
        for before, after in _word_steps(places)
    )
    lines = []
    for place in places:
        start = f"complete -c addnorm -n '__addnorm_at {place.name or '-'}'"
        for word, text in place.words.items():
            lines.append(f"{start} -f -a {word} -d {_fish_quote(text)}")
        for flag, text in place.options.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            choices = place.choices.get(flag)
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            lines.append(f"{start} {kind}{values} -d {_fish_quote(text)}")
    return f"""function __addnorm_at
    set -l place
    for word in (commandline -opc)[2..-1]
        switch "$place/$word"
{steps}
        end
    end
    test -n "$place"; or set place -
    test "$place" = "$argv[1]"
end
{chr(10).join(lines)}
"""


def _one_line(text: str) -> str:
    """Return a help text without the colons that separate a word from its help in zsh."""
    return " ".join(text.split()).replace("%%", "%").replace(":", " –")


def _fish_quote(text: str) -> str:
    text = _one_line(text).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
