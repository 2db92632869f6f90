"""How does a person try it in a browser? `ibaml serve`: a page on this machine, for nobody else.

`session` holds what is shown, without HTTP; `decoding` opens pictures in processes of their own;
`server` is the page's address and who may ask it what; `page/` is what the browser loads.
"""
