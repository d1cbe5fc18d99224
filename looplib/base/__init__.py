"""The ground of all rooms: errors, sentences, masks of secrets, files, folders, the console, plug-ins.

Names that other rooms may use, by file:
    console: bar_is_drawn, first_fault, guarded, last_line, noting_errors, printable, say
    decoding: decode, Limits, MisfitError, number, parse_json, READ, SHOWN, text, whole
    files: appending, async_impl, cannot_read, CannotReadError, check_temporary, check_writable, difference,
        fails_here, free_name, is_at, is_new_name, is_open_here, is_remote, make_durable, measure, new_name,
        NotRegularError, open_regular, open_to_append, paths, proves_damage, read_at, read_text, refuse_patterns,
        resolve, rewriting, safe_name, sizes, write_named, write_whole
    folders: check_folder, delete, inside, is_name, link, make_folder, move, move_aside, note_deletions, remove,
        remove_unfinished
    messages: cure_of, duration, gist, is_utf8, join_names, OURS, parse_error, shown, whole_number, with_cure
    numbers: forecast, format_number, format_seconds, format_share, format_size, headline, iso_time, Progress, utc
    orders: answer, answer_to, batch, current, has_reported, is_answered, news, Order, PreflightOrder, renew,
        ReplayOrder, tell, tell_batch
    plugins: Command, failure, load, names
"""
