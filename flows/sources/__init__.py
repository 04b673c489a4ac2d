"""Files of rows: one module per format, behind the face of source_file.SourceFile.

What becomes of odd input. A bad row is an error row of the job that names file and line, and the
job goes on; "stops" means a ConfigError before any weights load, for only the user can mend it.

| what is found | what happens |
|---|---|
| a byte order mark of UTF-8 at the start | skipped; elsewhere it makes a bad row |
| UTF-16, or a packed file under a plain name | stops |
| bytes that are not UTF-8 | bad row that names the byte |
| half of a surrogate pair, as an escape or in bytes | U+FFFD for the model, kept in the columns |
| NUL in a string | text like any other; in an id it makes a bad row |
| CRLF | a line end like LF |
| CR, U+0085, U+2028, U+2029 inside a line | part of the text, never a line end |
| an empty line, or one of blanks | no row; it counts as a line |
| a line that is no JSON, or no object | bad row |
| one key twice in an object | bad row: keeping one value would drop the other |
| nested deeper than 200 levels | bad row |
| a line longer than 64 MiB | bad row, and the line is not held in memory; in CSV it stops |
| a last line without line end | a row like any other; when it is torn, bad row |
| a packed file that was cut off | stops, naming the last line that could be read |
| CSV: more or fewer cells than the header | bad row |
| CSV: an empty cell | "" in the columns, and no value of a mapped column |
| CSV: text behind a closing quote | bad row; reading goes on with the next line |
| CSV: a quote that is never closed | stops: nobody can tell what the rows after it are |
| Parquet, dataset: dates, decimals, bytes | ISO 8601 text, decimal text, base64 text |
| two columns of one name in a header or schema | stops |
"""
