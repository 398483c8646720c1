from jaxdp.cli import main

main()
