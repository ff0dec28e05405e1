autocmd BufNewFile,BufRead *.mask setfiletype mask
