from jaxdp.cli import command

command()
