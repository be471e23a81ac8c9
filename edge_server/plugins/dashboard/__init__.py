"""Files of the page at `/` of the HTTP port, and of the API reference at `/docs/api`: HTML, CSS and ES modules.

No Python lives here. `frontends/http/page_endpoints.py` reads a file when a browser asks for it. All files together
have at most 150 KB, load nothing from elsewhere, and need no build step. `app.js` starts the page.
"""
