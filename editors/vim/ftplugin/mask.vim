setlocal commentstring=#\ %s
setlocal comments=:#
setlocal makeprg=maskc\ check\ %
