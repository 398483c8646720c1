"""The verb `completion`: print a shell script that completes verbs, options, keys and their values."""

from jaxdp.cli import Call
from jaxdp.cli.table import VERBS
from jaxdp.config.describe import groups
from jaxdp.errors import UsageError

SHELLS = ("bash", "zsh")
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = """_jaxdp() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" entry known
  if [ "$COMP_CWORD" = 1 ]; then
    known="{verbs} --help --version"
  else
    case "$before" in
{values}
      *)
        case "$word" in
          -*) ;;
          *) return ;;
        esac
        case "${{COMP_WORDS[1]}}" in
{options}
        esac ;;
    esac
  fi
  COMPREPLY=()
  for entry in $known; do
    case "$entry" in "$word"*) COMPREPLY+=("$entry") ;; esac
  done
}}
complete -o default -F _jaxdp jaxdp
"""


def run(call: Call) -> None:
    """Print the script for a shell. Where it has no candidates, the shell completes file names."""
    shell = call.options["shell"]
    if shell not in SHELLS:
        problem = f"{shell!r} is not known" if shell else "missing"
        raise UsageError(f"SHELL: {problem}; use one of {', '.join(SHELLS)}, e.g. jaxdp completion bash")
    keys = [key for group in groups() for key in group.keys]
    values = [f'      --{key.name}) known="{" ".join(key.choices)}" ;;' for key in keys if key.choices]
    values += ['      completion) known="bash zsh" ;;', '      data) known="tokenize" ;;']
    names = " ".join(f"--{key.name}" for key in keys)
    cases = []
    for name, verb in VERBS.items():
        options = " ".join(f"--{option}" for option in [*verb.options, "help"])
        cases.append(f'          {name}) known="{options}{f" --config {names}" if verb.has_config else ""}" ;;')
    head = f"# Completion of jaxdp for {shell}, made by `jaxdp completion {shell}`.\n"
    script = SCRIPT.format(verbs=" ".join(VERBS), values="\n".join(values), options="\n".join(cases))
    print(f"{head}{ZSH if shell == 'zsh' else ''}{script}", end="")
