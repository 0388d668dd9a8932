"""`clover serve`: the model behind the APIs that existing clients speak.

settings.py    flags and clover.toml          serve.py     from settings to a listening process
lifecycle.py   signals, stopping, a lost engine    connections.py  slow, endless and rude clients
app.py         routes and response plumbing   guard.py     request ids, hosts, keys, one log line a request
body.py        bytes to checked JSON          fields.py    fields taken by name; what is left is refused
request.py     fields the dialects share        chunks.py    what OpenAI's chat and text completions share in replies
service.py     prompts to jobs                generation.py  jobs to events
tools.py       a request's tools
forms.py       replies that follow a JSON schema    fill.py    templates and decisions, Clover's own two paths
chat.py completions.py responses.py messages.py   one dialect each: request in, reply and stream out
errors.py      one error, in each dialect's shape    metrics.py  Prometheus
page/          the chat page
"""
