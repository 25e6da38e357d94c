# The server has a user of its own: it needs no right of root's.

id -u nxpipe > /dev/null 2>&1 || useradd --system --no-create-home --shell /usr/sbin/nologin nxpipe
systemctl daemon-reload
systemctl enable --now nxpipe-agent.service
systemctl enable --now --no-block nxpipe-watch.service
