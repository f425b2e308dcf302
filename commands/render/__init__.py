"""What commands show: results of the rooms in, text for people out.

`console` prints (results on stdout, progress and notes on stderr) and writes traces; `plan`,
`profile` and `run` make tables of what a room returned; `error_report` writes the file that an
unexpected error is reported with. The text of searches is made in `search/report`.
"""
