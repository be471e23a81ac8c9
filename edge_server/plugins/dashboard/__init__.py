"""Web page of the server at `/` of the HTTP port, and the API reference at `/docs/api`.

`page/` has its files: HTML, CSS and ES modules, which need no build step. `page_endpoints` reads a file when a browser
asks for it. All files together have at most 150 KB and load nothing from elsewhere. `page/app.js` starts the page, and
`page/panels.js` imports the sections of other plugins (`RunningPlugin.panel`).
"""
